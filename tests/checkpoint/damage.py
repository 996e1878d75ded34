"""Damage of every kind to the files of a checkpoint, one byte or one cut at a time, undone after each.

`python tests/checkpoint/damage.py FOLDER NUMBER SEED` counts how much of it is noticed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.checkpoint.reader import open_checkpoint
from paceline.core.errors import CheckpointError


def mutations(folder: Path, number: int, seed: int) -> Iterator[str]:
    """Change one byte of one file, or cut it short, `number` times; each is named and in place until the next."""
    rng = random.Random(seed)
    originals = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    for _ in range(number):
        path = rng.choice(list(originals))
        changed = bytearray(originals[path])
        place = rng.randrange(len(changed))
        if rng.random() < 0.8:
            changed[place] ^= rng.randrange(1, 256)
            what = f"byte {place} of {path.name} changed"
        else:
            del changed[place:]
            what = f"{path.name} cut after {place} bytes"
        path.write_bytes(changed)
        try:
            yield what
        finally:
            path.write_bytes(originals[path])


def unnoticed(folder: Path, number: int, seed: int) -> list[str]:
    """The mutations with which the checkpoint could be opened all the same."""
    missed = []
    for what in mutations(folder, number, seed):
        try:
            open_checkpoint(folder)
        except CheckpointError:
            continue
        missed.append(what)
    return missed


if __name__ == "__main__":
    where, how_many, start = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    found = unnoticed(where, how_many, start)
    print(f"{how_many - len(found)} of {how_many} mutations noticed", *found, sep="\n")
    sys.exit(bool(found))
