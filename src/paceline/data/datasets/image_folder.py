"""Photos in folders, a folder a class."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.arguments import Count, CountOrZero, KeyOf
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import Extensions, Name, SplitShares
from paceline.data.batch import Sample
from paceline.data.index.folders import (
    EXTENSIONS,
    files_below,
    folder_names,
    left_out_note,
    refuse_escape,
    refuse_escaping_file,
)
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.index.splits import read_part, split_arguments, write_parts
from paceline.data.io.image import MAX_PIXELS, Encoded, decode_image

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest

_SPLITS = {"train", "val", "valid", "validation", "test"}


@register.dataset("image_folder", checks=[KeyOf("split", "split_shares")])
class ImageFolder:
    """The images under root/split/class/, or root/class/ without a split, at any depth below their class.

    Classes and images are numbered in the order of their names. With `split_shares` the images of root/class/ are
    split by chance instead, and `split` is one part. With `min_size`, large JPEG files are decoded faster, reduced to
    a height and width not below it. Links that lead out of the root are a DataError unless `follow_links`; images of
    more than `max_pixels` are never decoded.
    """

    channels = 3

    def __init__(
        self,
        root: Path,
        split: Name | None = None,
        extensions: Extensions | None = None,
        min_size: Count | None = None,
        follow_links: bool = False,
        max_pixels: Count = MAX_PIXELS,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
    ) -> None:
        root = Path(root)
        self.folder = root / split if split and not split_shares else root
        self.max_pixels = max_pixels
        self.min_size = None if min_size is None else (min_size, min_size)
        endings = tuple(extension.lower() for extension in extensions or EXTENSIONS)
        self._inside = inside = None if follow_links else root

        def build(builder: IndexBuilder) -> None:
            size = _write(builder, self.folder, endings, inside)
            write_parts(builder, size, split_shares, split_seed)

        arguments = {"split": None if split_shares else split, "extensions": endings, "follow_links": follow_links}
        try:
            _check_layout(root, self.folder)
            refuse_escape(self.folder, inside)
            index = open_index(root, "folder", arguments | split_arguments(split_shares, split_seed), build)
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be listed ({error.strerror})") from error
        self.classes = [os.fsdecode(name) for name in index.texts("class")]
        self.notes = [note.decode(errors="replace") for note in index.texts("note")]
        self._names, self._labels = index.ragged("image"), index.column("label")
        self._part = read_part(index, split, split_shares, len(self._names))

    def __len__(self) -> int:
        return len(self._part)

    def path(self, index: int) -> Path:
        """The file of image `index`."""
        return self.folder / os.fsdecode(self._names[self._part[index]].tobytes())

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images to a fingerprint."""
        digest.files(self.folder, self._names.texts(self._part))

    def open(self, index: int) -> Sample:
        """The image, not decoded yet unless there is a `min_size` to decode it for, and its label."""
        if self.min_size is not None:
            return self.read(index)
        return {"image": Encoded.read(self._checked_path(index), self.max_pixels), "label": self._label(index)}

    def read(self, index: int) -> Sample:
        """The decoded image, uint8 [H, W, 3], and its label."""
        image = decode_image(self._checked_path(index), self.max_pixels, self.min_size)
        return {"image": image, "label": self._label(index)}

    def _checked_path(self, index: int) -> Path:
        path = self.path(index)
        refuse_escaping_file(path, self._inside)
        return path

    def _label(self, index: int) -> int:
        return int(self._labels[self._part[index]])


def _check_layout(root: Path, folder: Path) -> None:
    layout = f"expected {folder}/<class>/<image>.jpg, a folder a class"
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; {layout}")
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; {root} has {', '.join(folder_names(root)) or 'no folders'}")
    names = folder_names(folder)
    if not names:
        raise DataError(f"{folder}: no class folders in it; {layout}")
    if folder == root and "train" in names and _SPLITS.issuperset(names):
        raise DataError(f"{root}: has the splits {', '.join(names)}, not classes; add `split: train`")


def _write(builder: IndexBuilder, folder: Path, endings: tuple[str, ...], inside: Path | None) -> int:
    """The names of the images as paths relative to `folder`, class after class, and their labels; returns how many."""
    builder.watch(folder)
    classes, size, left_out = folder_names(folder), 0, Counter[str]()
    for label, name in enumerate(classes):
        files = files_below(folder, name, endings, inside, builder.watch, left_out=left_out)
        found = sorted(map(os.fsencode, files))
        if not found:
            expected = f"expected files ending in {' '.join(endings)}"
            raise DataError(f"{folder / name}: no images in this class folder; {expected}")
        builder.texts("image", found)
        builder.numbers("label", np.full(len(found), label, np.int32))
        size += len(found)
    builder.texts("class", [os.fsencode(name) for name in classes])
    builder.texts("note", [os.fsencode(note) for note in left_out_note(left_out, "images", endings)])
    return size
