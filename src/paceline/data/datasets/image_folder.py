"""Photos in folders, a folder a class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.data.batch import Sample
from paceline.data.decode import decode_image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
_SPLITS = {"train", "val", "valid", "validation", "test"}


class ImageFolder:
    """The images under root/split/class/, or root/class/ without a split, at any depth below their class.

    Classes and images are numbered in the order of their names. With `min_size`, large JPEG files are decoded
    faster, reduced to a height and width not below it.
    """

    channels = 3

    def __init__(
        self,
        root: Path,
        split: str | None = None,
        extensions: Sequence[str] | None = None,
        min_size: int | None = None,
    ) -> None:
        self.folder = Path(root) / split if split else Path(root)
        self.min_size = None if min_size is None else (min_size, min_size)
        endings = tuple(extension.lower() for extension in extensions or EXTENSIONS)
        try:
            self.classes = _class_names(Path(root), self.folder)
            found = [_image_names(self.folder, name, endings) for name in self.classes]
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be listed ({error.strerror})") from error
        # All names in one piece of memory, which worker processes share; a list of strings they would copy.
        names = [name for of_class in found for name in of_class]
        self._names = np.frombuffer(b"".join(names), np.uint8)
        self._ends = np.cumsum([len(name) for name in names])
        self._labels = np.repeat(np.arange(len(found)), [len(of_class) for of_class in found])

    def __len__(self) -> int:
        return len(self._labels)

    def path(self, index: int) -> Path:
        """The file of image `index`."""
        start = self._ends[index - 1] if index else 0
        return self.folder / os.fsdecode(self._names[start : self._ends[index]].tobytes())

    def read(self, index: int) -> Sample:
        """The decoded image, uint8 [H, W, 3], and its label."""
        image = decode_image(self.path(index), min_size=self.min_size)
        return {"image": image, "label": int(self._labels[index])}


def _class_names(root: Path, folder: Path) -> list[str]:
    layout = f"expected {folder}/<class>/<image>.jpg, a folder a class"
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; {layout}")
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; {root} has {', '.join(_folders(root)) or 'no folders'}")
    names = _folders(folder)
    if not names:
        raise DataError(f"{folder}: no class folders in it; {layout}")
    if folder == root and "train" in names and _SPLITS.issuperset(names):
        raise DataError(f"{root}: has the splits {', '.join(names)}, not classes; add `split: train`")
    return names


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _image_names(folder: Path, class_name: str, endings: tuple[str, ...]) -> list[bytes]:
    """The images of a class as paths relative to `folder`, sorted."""
    top = folder / class_name
    found: list[bytes] = []
    for parent, folders, files in os.walk(top, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = os.path.relpath(parent, folder)
        found += [
            os.fsencode(f"{inside}/{name}")
            for name in files
            if not name.startswith(".") and name.lower().endswith(endings)
        ]
    if not found:
        raise DataError(f"{top}: no images in this class folder; expected files ending in {' '.join(endings)}")
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error
