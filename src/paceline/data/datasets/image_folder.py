"""Images in folders, a folder per class, and images and videos without labels, which `predict` reads."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import CountOrZero, KeyOf
from paceline.core.errors import DataError, UsageError
from paceline.core.registry import register
from paceline.data.argument_types import Extensions, Name, SplitShares
from paceline.data.batch import KeypointNames, Sample
from paceline.data.fingerprint import DataDigest
from paceline.data.index.folders import (
    FileDataset,
    NamedFiles,
    class_folders,
    files_below,
    refuse_escape,
    skipped_note,
)
from paceline.data.index.index import IndexBuilder, drawn_part, open_index
from paceline.data.io.image import EXTENSIONS, Encoded


class ClassFolders(FileDataset):
    """Files under root/split/class/, or root/class/ without a split, at any depth below their class."""

    kind, example = "image", "image.jpg"
    usual_extensions = EXTENSIONS

    def __init__(
        self,
        root: Path,
        split: Name | None = None,
        extensions: Extensions | None = None,
        follow_links: bool = False,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        stratify: bool = True,
    ) -> None:
        root = Path(root)
        folder = root / split if split and not split_shares else root
        suffixes = tuple(extension.lower() for extension in extensions or self.usual_extensions)
        inside = None if follow_links else root
        class_folders(root, folder, self.example)
        refuse_escape(folder, inside)

        def build(builder: IndexBuilder) -> None:
            builder.watch(folder)
            builder.facts["classes"] = classes = class_folders(root, folder, self.example)
            skipped = Counter[str]()
            for label, name in enumerate(classes):
                files = files_below(folder, name, suffixes, inside, builder.watch, (), skipped)
                found = sorted(map(os.fsencode, files))
                if not found:
                    expected = f"expected files with the extensions {' '.join(suffixes)}"
                    raise DataError(f"{folder / name}: no {self.kind}s in this class folder; {expected}")
                builder.append_texts("file", found)
                builder.append("label", np.full(len(found), label, np.int32))
            if note := skipped_note(skipped, f"{self.kind}s", suffixes):
                builder.note(note)

        arguments = {"kind": self.kind, "extensions": suffixes, "follow_links": follow_links}
        self._index = index = open_index(folder, "folders", arguments, build)
        self.classes: list[str] = index.facts["classes"]
        self.notes: list[str] = index.facts["notes"]
        self._files = NamedFiles(index, "file", folder, inside)
        labels = index["label"] if stratify else None
        self._part = drawn_part(len(self._files), split, split_shares, split_seed, labels)

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the files to a fingerprint."""
        digest.files(self._files.folder, self._files.names(self._part))

    def _checked_path(self, index: int) -> Path:
        return self._files.checked(self._part[index])

    def _label(self, index: int) -> int:
        return int(self._index["label"][self._part[index]])


@register.dataset("image_folder", checks=[KeyOf("split", "split_shares")])
class ImageFolder(ClassFolders):
    """Images under root/split/class/, or root/class/ without a split, at any depth below their class.

    Classes and images are numbered in the order of their names. With `split_shares` the images of root/class/ are
    split at random, and `split` is one part. Links that lead out of the root are a DataError unless `follow_links`.
    """

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, and its label."""
        return {"image": Encoded.read(self._checked_path(index)), "label": self._label(index)}


Placeholder = Callable[[int, int], Sample]
"""The fields that stand for the missing labels of an image of this height and width."""


class Unlabeled:
    """Images or videos by number. `placeholder` fills in what the task's transforms and collation expect."""

    has_labels = False
    joints: KeypointNames | None = None
    category_ids: list[int] | None = None
    """What the classes are called in files of predictions; None: 1, 2, …"""

    def __init__(
        self,
        items: Sequence[Path] | Sequence[NDArray[np.uint8]],
        classes: Sequence[str],
        channels: int,
        placeholder: Placeholder,
        reads_videos: bool = False,
    ) -> None:
        self.classes, self.channels, self.reads_videos = list(classes), channels, reads_videos
        self._items: list[Any] = list(items)
        self._placeholder = placeholder

    def __len__(self) -> int:
        return len(self._items)

    def _with_placeholders(self, image: Any, height: int, width: int) -> Sample:
        return {"image": image, "size": np.array([height, width]), **self._placeholder(height, width)}


class UnlabeledFiles(Unlabeled):
    """Files of images, or of videos."""

    def path(self, index: int) -> Path:
        """The file of sample `index`."""
        path: Path = self._items[index]
        return path

    def open(self, index: int) -> Sample:
        """The image or video, not decoded unless the model takes gray images, and placeholders for its labels."""
        path = self.path(index)
        if self.reads_videos:
            from paceline.data.io.video import EncodedVideo

            return {"image": EncodedVideo(path), **self._placeholder(0, 0)}
        image = Encoded.read(path)
        pixels = image if self.channels == 3 else to_channels(image.decode(), self.channels, path)
        return self._with_placeholders(pixels, image.height, image.width)

    def read(self, index: int) -> Sample:
        """The same with the image decoded."""
        sample = self.open(index)
        return {**sample, "image": sample["image"].decode()} if isinstance(sample["image"], Encoded) else sample


class UnlabeledArrays(Unlabeled):
    """Images in memory, uint8 [H, W, C]."""

    def read(self, index: int) -> Sample:
        """The image and placeholders for its labels."""
        image = np.asarray(self._items[index])
        image = image[:, :, None] if image.ndim == 2 else image
        return self._with_placeholders(to_channels(image, self.channels), *image.shape[:2])


def to_channels(image: NDArray[np.uint8], channels: int, path: Path | None = None) -> NDArray[np.uint8]:
    """The image with as many channels as the model takes: color becomes gray, gray becomes color."""
    given = image.shape[2]
    if given == channels:
        return image
    if (given, channels) == (3, 1):
        return np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[:, :, None], np.uint8)
    if (given, channels) == (1, 3):
        return np.repeat(image, 3, axis=2)
    where = f"{path}: " if path else ""
    raise DataError(f"{where}the image has {given} channels, the model takes {channels}")


def find_files(inputs: Sequence[Path], videos: bool) -> list[Path]:
    """The files that are named, those of folders at any depth, and those that lists name, each once, in this order.

    A list is a .txt or .csv file with a path in the first column of each line, relative to the list's folder.
    """
    extensions = EXTENSIONS
    if videos:
        from paceline.data.io.video import EXTENSIONS as extensions  # noqa: N811
    found: dict[Path, None] = {}
    for place in inputs:
        if place.is_dir():
            below = sorted(Path(folder) / name for folder, _, names in os.walk(place) for name in names)
            found |= dict.fromkeys(path for path in below if path.suffix.lower() in extensions)
        elif place.suffix.lower() in (".txt", ".csv"):
            found |= dict.fromkeys(_read_list(place, extensions))
        elif place.exists():
            found[place] = None
        else:
            raise UsageError(f"{place}: no such file or folder")
    if not found:
        kind = "videos" if videos else "images"
        where = ", ".join(map(str, inputs))
        raise UsageError(f"{where}: no {kind} found; expected files with the extensions {' '.join(extensions)}")
    return list(found)


def _read_list(path: Path, extensions: Sequence[str]) -> list[Path]:
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    cells = [line.split(",")[0].strip().strip('"') for line in lines if line.strip()]
    # The first line may name the columns.
    names = cells[1:] if cells and Path(cells[0]).suffix.lower() not in extensions else cells
    return [path.parent / name for name in names]
