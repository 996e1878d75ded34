"""The image files of a data set by number, held so compactly that worker processes share them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.indexes.kept_arrays import joined
from paceline.data.reading.decode import MAX_PIXELS
from paceline.data.reading.encoded import Encoded

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
"""How the names of image files end."""


class ImageFiles:
    """Files in a folder below `root`, by number. One that leads out of `root` is not opened unless `follow_links`.

    Their names are given as one array, and where each of them ends, as `packed_names` makes them.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        names: NDArray[np.uint8],
        ends: NDArray[Any],
        follow_links: bool = False,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.root, self.folder = root, folder
        self.follow_links = follow_links
        self.max_pixels = max_pixels
        self._names, self._ends = names, ends

    def __len__(self) -> int:
        return len(self._ends)

    def path(self, index: int) -> Path:
        """The file of image `index`."""
        start = int(self._ends[index - 1]) if index else 0
        return self.folder / os.fsdecode(self._names[start : self._ends[index]].tobytes())

    def open(self, index: int) -> Encoded:
        """Image `index`, read but not decoded; raises DataError if it is missing, no image or not in its place."""
        path = self.path(index)
        if not self.follow_links:
            real = Path(os.path.realpath(path))
            if not real.is_relative_to(os.path.realpath(self.root)):
                raise DataError(
                    f"{path}: leads out of {self.root}, to {real}; add `follow_links: true` if that is meant"
                )
        return Encoded.read(path, self.max_pixels)


def packed_names(folder: Path, names: Iterable[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The names of files in one piece of memory, which processes share, and where each of them ends."""
    return joined(_encoded(folder, name) for name in names)


def _encoded(folder: Path, name: str) -> bytes:
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        encoded = b""
    if not encoded or b"\0" in encoded:
        raise DataError(f"{folder}: {name!r} cannot be the name of an image file")
    return encoded
