"""Videos with labels: in folders, a folder a class, or named by a list."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from paceline.core.errors import DataError
from paceline.data.batch import Sample
from paceline.data.datasets.listed import ListFile
from paceline.data.indexes.folders import (
    files_below,
    folder_names,
    left_out_note,
    refuse_escape,
    refuse_escaping_file,
)
from paceline.data.indexes.index import IndexBuilder, open_index
from paceline.data.indexes.listing import Column, Format
from paceline.data.indexes.splits import read_part, split_arguments, write_parts
from paceline.data.reading.video import MAX_FRAMES, EncodedVideo
from paceline.data.reading.video_opening import MAX_PIXELS

EXTENSIONS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".3gp")
_SPLITS = {"train", "val", "valid", "validation", "test"}


class VideoFolder:
    """The videos under root/split/class/, or root/class/ without a split, at any depth below their class.

    Classes and videos are numbered in the order of their names. With `split_shares` the videos are split by chance, and
    `split` is one part. A sample's "image" is an EncodedVideo, of which the first transform chooses frames.
    """

    channels = 3
    reads_videos = True

    def __init__(
        self,
        root: Path,
        split: str | None = None,
        extensions: Sequence[str] | None = None,
        split_shares: Mapping[str, float] | None = None,
        split_seed: int = 0,
        follow_links: bool = False,
        max_pixels: int = MAX_PIXELS,
        max_frames: int = MAX_FRAMES,
    ) -> None:
        root = Path(root)
        self.folder = root / split if split and not split_shares else root
        self.max_pixels, self.max_frames = max_pixels, max_frames
        self._inside = None if follow_links else root
        endings = tuple(extension.lower() for extension in extensions or EXTENSIONS)
        _check_layout(root, self.folder)

        def build(builder: IndexBuilder) -> None:
            size = _write(builder, self.folder, endings, self._inside)
            write_parts(builder, size, split_shares, split_seed)

        arguments = {"endings": endings, "links": follow_links} | split_arguments(split_shares, split_seed)
        try:
            index = open_index(self.folder, "videos", arguments, build)
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be listed ({error.strerror})") from error
        self.classes = [os.fsdecode(name) for name in index.texts("class")]
        self.notes = [note.decode(errors="replace") for note in index.texts("note")]
        self._names, self._labels = index.ragged("video"), index.column("label")
        self._part = read_part(index, split, split_shares, len(self._names))

    def __len__(self) -> int:
        return len(self._part)

    def path(self, index: int) -> Path:
        """The file of video `index`."""
        return self.folder / os.fsdecode(self._names[self._part[index]].tobytes())

    def open(self, index: int) -> Sample:
        """The video, not decoded, and its label."""
        path = self.path(index)
        refuse_escaping_file(path, self._inside)
        label = int(self._labels[self._part[index]])
        return {"image": EncodedVideo(path, self.max_pixels, self.max_frames), "label": label}

    def read(self, index: int) -> Sample:
        """The same: a video is decoded by the transform that chooses frames."""
        return self.open(index)


class VideoList(ListFile):
    """The videos of a list, a line each: names relative to `root`, the list's own folder unless given, and labels.

    The list and its columns are as those of images (`list`), with `video` for the column of names, or a pattern of
    several columns: Kinetics is "{youtube_id}_{time_start:06}_{time_end:06}.mp4". With `fold`, column `fold_column`
    tells the fold of each video, and the split "train" has all folds but this one, "val" and "test" this one. A
    sample's "image" is an EncodedVideo, of which the first transform chooses frames.
    """

    reads_videos = True
    listed = "video"

    def __init__(
        self,
        file: Path,
        root: Path | None = None,
        format: Format | None = None,  # noqa: A002 - the word for it in recipes
        video: Column | None = None,
        label: Column | None = None,
        label_separator: str | None = None,
        classes: Sequence[str] | None = None,
        split: str | None = None,
        fold: int | None = None,
        fold_column: Column = 3,
        split_shares: Mapping[str, float] | None = None,
        split_seed: int = 0,
        follow_links: bool = False,
        max_pixels: int = MAX_PIXELS,
        max_frames: int = MAX_FRAMES,
        delimiter: str | None = None,
        label_from: Literal["column", "folder"] = "column",
        first_label: int = 0,
        split_column: Column | None = None,
    ) -> None:
        columns = video, label, label_separator
        labels, parts = (delimiter, label_from, first_label), (split, split_shares, split_seed)
        listed_parts = split_column, fold, fold_column
        super().__init__(
            file, root, format, *columns, classes, *parts, follow_links, max_pixels, *labels, *listed_parts
        )
        self.max_frames = max_frames

    def open(self, index: int) -> Sample:
        """The video, not decoded, and its label if the list has labels."""
        path = self.path(index)
        try:
            refuse_escaping_file(path, self._inside)
            if not path.exists():
                raise DataError(f"{path}: no such file")
        except (DataError, OSError, ValueError) as error:
            raise self._at_its_line(index, error) from error
        return {"image": EncodedVideo(path, self.max_pixels, self.max_frames)} | self._label(index)

    def read(self, index: int) -> Sample:
        """The same: a video is decoded by the transform that chooses frames."""
        return self.open(index)


def _check_layout(root: Path, folder: Path) -> None:
    layout = f"expected {folder}/<class>/<video>.mp4, a folder a class"
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
    """The names and labels of all videos; returns how many there are."""
    refuse_escape(folder, inside)
    builder.watch(folder)
    size, left_out = 0, Counter[str]()
    for label, name in enumerate(folder_names(folder)):
        files = files_below(folder, name, endings, inside, builder.watch, left_out=left_out)
        found = sorted(map(os.fsencode, files))
        if not found:
            raise DataError(
                f"{folder / name}: no videos in this class folder; expected files ending in {' '.join(endings)}"
            )
        builder.texts("class", [os.fsencode(name)])
        builder.texts("video", found)
        builder.numbers("label", np.full(len(found), label, np.int32))
        size += len(found)
    builder.texts("note", [os.fsencode(note) for note in left_out_note(left_out, "videos", endings)])
    return size
