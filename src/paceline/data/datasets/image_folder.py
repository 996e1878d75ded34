"""Photos in folders, a folder a class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.data.batch import Sample
from paceline.data.decode import MAX_PIXELS, decode_image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
_SPLITS = {"train", "val", "valid", "validation", "test"}


class ImageFolder:
    """The images under root/split/class/, or root/class/ without a split, at any depth below their class.

    Classes and images are numbered in the order of their names. With `min_size`, large JPEG files are decoded
    faster, reduced to a height and width not below it. Links that lead out of the root are a DataError unless
    `follow_links`; images of more than `max_pixels` are never decoded.
    """

    channels = 3

    def __init__(
        self,
        root: Path,
        split: str | None = None,
        extensions: Sequence[str] | None = None,
        min_size: int | None = None,
        follow_links: bool = False,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.folder = Path(root) / split if split else Path(root)
        self.max_pixels = max_pixels
        self.min_size = None if min_size is None else (min_size, min_size)
        endings = tuple(extension.lower() for extension in extensions or EXTENSIONS)
        inside = None if follow_links else Path(root)
        try:
            self.classes = _class_names(Path(root), self.folder)
            _refuse_escape(self.folder, inside)
            found = [_image_names(self.folder, name, endings, inside) for name in self.classes]
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
        image = decode_image(self.path(index), self.max_pixels, self.min_size)
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


def _image_names(folder: Path, class_name: str, endings: tuple[str, ...], inside: Path | None) -> list[bytes]:
    """The images of a class as paths relative to `folder`, sorted; links may not lead out of `inside`."""
    found = [os.fsencode(name) for name in _files(folder, class_name, endings, inside, ())]
    if not found:
        expected = f"expected files ending in {' '.join(endings)}"
        raise DataError(f"{folder / class_name}: no images in this class folder; {expected}")
    return sorted(found)


def _files(
    top: Path, name: str, endings: tuple[str, ...], inside: Path | None, above: tuple[str, ...]
) -> Iterator[str]:
    """The files with these endings in folder `name` of `top` and below it; `above` are the real folders it is in."""
    folder = top / name
    real = os.path.realpath(folder)
    if real in above:
        raise DataError(f"{folder}: a link that leads back to a folder it is in ({real}); remove it")
    if not above:
        _refuse_escape(folder, inside)
    with os.scandir(folder) as entries:
        listed = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in listed:
        is_folder = entry.is_dir()
        if not is_folder and not entry.name.lower().endswith(endings):
            continue
        if entry.is_symlink():
            _refuse_escape(folder / entry.name, inside)
        if is_folder:
            yield from _files(top, f"{name}/{entry.name}", endings, inside, (*above, real))
        else:
            yield f"{name}/{entry.name}"


def _refuse_escape(path: Path, inside: Path | None) -> None:
    """Data may come from anywhere that a recipe names, but what lies in it may not lead elsewhere unasked."""
    if inside is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(inside)):
        target = os.path.realpath(path)
        raise DataError(f"{path}: leads out of {inside}, to {target}; add `follow_links: true` if that is meant")
