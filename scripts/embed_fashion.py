"""Make the part of Fashion-MNIST that comes with the package from the full IDX files.

    python scripts/embed_fashion.py FOLDER_WITH_THE_FULL_FILES [FOLDER_TO_WRITE]

The first images of each class are taken, in their original order; running it again gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import struct
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.datasets.idx import FASHION_CLASSES, Split, idx

EMBEDDED = Path(__file__).parent.parent / "src" / "paceline" / "data" / "embedded" / "fashion"
PER_CLASS: dict[Split, int] = {"train": 600, "test": 200}
PREFIXES: dict[Split, str] = {"train": "train", "test": "t10k"}


def main() -> None:
    """Write both splits and say how large they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?", default=EMBEDDED)
    folders = parser.parse_args()
    folders.target.mkdir(parents=True, exist_ok=True)
    for split in PER_CLASS:
        embed(folders.source, folders.target, split)


def embed(source: Path, target: Path, split: Split) -> None:
    """Write the images and labels of one split."""
    full = idx(source, split, FASHION_CLASSES)
    labels = full.fields["label"]
    firsts = [torch.nonzero(labels == k).flatten()[: PER_CLASS[split]] for k in range(len(FASHION_CLASSES))]
    chosen = torch.cat(firsts).sort().values
    for name, values in (
        ("images-idx3-ubyte", full.images[chosen, 0]),
        ("labels-idx1-ubyte", labels[chosen].to(torch.uint8)),
    ):
        path = target / f"{PREFIXES[split]}-{name}.gz"
        path.write_bytes(packed(values.numpy()))
        print(f"{path.name}: {' × '.join(map(str, values.shape))}, {path.stat().st_size:,} bytes")


def packed(values: NDArray[np.uint8]) -> bytes:
    """An IDX file of bytes, packed without a time stamp so that it depends on the content alone."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 0x08, values.ndim, *values.shape)
    return gzip.compress(header + values.tobytes(), compresslevel=9, mtime=0)


if __name__ == "__main__":
    main()
