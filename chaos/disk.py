"""A disk that is full for a while, under a real run: on a small file system of its own."""

from __future__ import annotations

import errno
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos.row import Row
from chaos.training import STEPS, Command, difference, last_of, undisturbed

_MEGABYTES = 6


def run(quick: bool) -> list[Row]:
    """Space that goes at a random instant, and comes back."""
    number = 1 if quick else 10
    generator = random.Random(17)
    fault, goal = "no space left on the disk for a while", "the checkpoint before is whole, the run finishes, same bits"
    good, problems = 0, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = undisturbed(folder, 2)
        for attempt in range(number):
            try:
                with small_disk(folder / "disk") as disk:
                    problem = _fill(disk, f"full-{attempt}", generator, whole)
            except PermissionError as error:
                print(f"disk: left out, since a file system cannot be mounted here ({error})")
                return [Row(fault, goal, "not tried: a file system cannot be mounted here", True)]
            good += problem is None
            problems += [f"full-{attempt}: {problem}"] if problem else []
    print("\n".join(problems))
    return [Row(fault, goal, f"{good}/{number}", good == number)]


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of a few megabytes; PermissionError where none may be mounted."""
    path.mkdir(exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={_MEGABYTES}m", "paceline-chaos", str(path)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PermissionError(done.stderr.strip())
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _fill(disk: Path, out: str, generator: random.Random, whole: dict[str, str]) -> str | None:
    command = Command(disk, out, 2)
    wanted = int(generator.uniform(0.1, 0.6) * STEPS)
    command.wait_until(lambda: command.steps_done() >= wanted)
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    filled_at = command.steps_done()
    command.wait_until(lambda: command.steps_done() >= filled_at + 25)  # at least two checkpoints fall into it
    went_on = command.steps_done() > filled_at
    time.sleep(generator.uniform(0.0, 0.5))
    filler.unlink()
    code = command.wait()
    if code != 0 or not went_on:
        return f"ended with {code}, went on meanwhile: {went_on}: {command.said()[-500:]}"
    return difference(last_of(whole), command)
