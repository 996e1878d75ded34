"""Images in folders, a folder per class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.arguments import Count, CountOrZero, KeyOf
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import Extensions, Name, SplitShares
from paceline.data.batch import Sample
from paceline.data.index.folders import (
    NamedFiles,
    class_folders,
    files_below,
    refuse_escape,
    refuse_escapes,
    skipped_note,
)
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.index.splits import read_part, split_arguments, write_parts
from paceline.data.io.image import EXTENSIONS, MAX_PIXELS, Encoded, decode_image

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest


class ClassFolders:
    """Files under root/split/class/, or root/class/ without a split, at any depth below their class.

    Classes and files are numbered in the order of their names. With `shares` the split is drawn.
    """

    channels = 3
    kind, example = "image", "image.jpg"

    def __init__(
        self,
        root: Path,
        split: str | None,
        extensions: Sequence[str],
        shares: Mapping[str, float] | None,
        seed: int,
        follow_links: bool,
    ) -> None:
        folder = root / split if split and not shares else root
        endings = tuple(extension.lower() for extension in extensions)
        inside = None if follow_links else root
        class_folders(root, folder, self.example)
        refuse_escape(folder, inside)

        def build(builder: IndexBuilder) -> None:
            builder.watch(folder)
            builder.facts["classes"] = classes = class_folders(root, folder, self.example)
            size, skipped, escaping = 0, Counter[str](), list[Path]()
            for label, name in enumerate(classes):
                files = files_below(folder, name, endings, inside, builder.watch, (), skipped, escaping)
                found = sorted(map(os.fsencode, files))
                if not found:
                    expected = f"expected files with the extensions {' '.join(endings)}"
                    raise DataError(f"{folder / name}: no {self.kind}s in this class folder; {expected}")
                builder.append_texts("file", found)
                builder.append("label", np.full(len(found), label, np.int32))
                size += len(found)
            refuse_escapes(escaping, inside)
            if note := skipped_note(skipped, f"{self.kind}s", endings):
                builder.note(note)
            write_parts(builder, size, shares, seed)

        arguments = {"kind": self.kind, "extensions": endings, "follow_links": follow_links}
        index = open_index(folder, "folders", arguments | split_arguments(shares, seed), build)
        self.classes: list[str] = index.facts["classes"]
        self.notes: list[str] = index.facts["notes"]
        self._files, self._labels = NamedFiles(index, "file", folder, inside), index.column("label")
        self._part = read_part(index, split, shares, len(self._files))

    def __len__(self) -> int:
        return len(self._part)

    def path(self, index: int) -> Path:
        """The file of sample `index`."""
        return self._files.path(self._part[index])

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the files to a fingerprint."""
        digest.files(self._files.folder, self._files.names(self._part))

    def _checked_path(self, index: int) -> Path:
        return self._files.checked(self._part[index])

    def _label(self, index: int) -> int:
        return int(self._labels[self._part[index]])


@register.dataset("image_folder", checks=[KeyOf("split", "split_shares")])
class ImageFolder(ClassFolders):
    """Images under root/split/class/, or root/class/ without a split, at any depth below their class.

    Classes and images are numbered in the order of their names. With `split_shares` the images of root/class/ are
    split at random, and `split` is one part. With `min_size`, large JPEG files are decoded faster, reduced to a height
    and width not below it. Links that lead out of the root are a DataError unless `follow_links`; images of more than
    `max_pixels` are never decoded.
    """

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
        super().__init__(Path(root), split, extensions or EXTENSIONS, split_shares, split_seed, follow_links)
        self.max_pixels = max_pixels
        self.min_size = None if min_size is None else (min_size, min_size)

    def open(self, index: int) -> Sample:
        """The image, not decoded yet unless there is a `min_size` to decode it for, and its label."""
        if self.min_size is not None:
            return self.read(index)
        return {"image": Encoded.read(self._checked_path(index), self.max_pixels), "label": self._label(index)}

    def read(self, index: int) -> Sample:
        """The decoded image, uint8 [H, W, 3], and its label."""
        image = decode_image(self._checked_path(index), self.max_pixels, self.min_size)
        return {"image": image, "label": self._label(index)}
