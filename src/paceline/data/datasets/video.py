"""Videos with labels: one folder per class, or named by a list file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from paceline.core.arguments import Count, CountOrZero, KeyOf, Positive
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import ClassNames, Column, Extensions, Name
from paceline.data.batch import Sample
from paceline.data.datasets.list_file import LIST_CHECKS, ListFile
from paceline.data.index.folders import (
    files_below,
    folder_names,
    left_out_note,
    refuse_escape,
    refuse_escaping_file,
)
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.index.list_file import Format
from paceline.data.index.splits import read_part, split_arguments, write_parts
from paceline.data.io.video import MAX_FRAMES, EncodedVideo
from paceline.data.io.video_file import MAX_PIXELS
from paceline.data.split_loader import Dataset

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest


EXTENSIONS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".3gp")
Ratios = Annotated[Mapping[Name, Positive], Field(min_length=1)]
"""Shares of any sum."""
_SPLITS = {"train", "val", "valid", "validation", "test"}


@register.dataset("video_folder", checks=[KeyOf("split", "split_shares")])
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
        split: Name | None = None,
        extensions: Extensions | None = None,
        split_shares: Ratios | None = None,
        split_seed: CountOrZero = 0,
        follow_links: bool = False,
        max_pixels: Count = MAX_PIXELS,
        max_frames: Count = MAX_FRAMES,
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

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the videos to a fingerprint."""
        digest.files(self.folder, self._names.texts(self._part))

    def open(self, index: int) -> Sample:
        """The video, not decoded, and its label."""
        path = self.path(index)
        refuse_escaping_file(path, self._inside)
        label = int(self._labels[self._part[index]])
        return {"image": EncodedVideo(path, self.max_pixels, self.max_frames), "label": label}

    def read(self, index: int) -> Sample:
        """The same: a video is decoded by the transform that chooses frames."""
        return self.open(index)


@register.dataset("video_list", checks=LIST_CHECKS)
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
        label_separator: Name | None = None,
        classes: ClassNames | None = None,
        split: Name | None = None,
        fold: CountOrZero | None = None,
        fold_column: Column = 3,
        split_shares: Ratios | None = None,
        split_seed: CountOrZero = 0,
        follow_links: bool = False,
        max_pixels: Count = MAX_PIXELS,
        max_frames: Count = MAX_FRAMES,
        delimiter: Name | None = None,
        label_from: Literal["column", "folder"] = "column",
        first_label: CountOrZero = 0,
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


class ClipsApart:
    """A data set of videos as one of clips: sample k·clips + c is clip c of video k.

    A sample has the number of its video as "video", by which metrics join clips again, and that of its clip as "clip",
    by which the transform chooses frames.
    """

    reads_videos = True

    def __init__(self, videos: Dataset, clips: int) -> None:
        self.videos = videos
        self.clips = clips
        self.classes, self.channels = videos.classes, videos.channels
        self.notes: list[str] = getattr(videos, "notes", [])
        self.why_no_labels: str = getattr(videos, "why_no_labels", "")
        self._open: Callable[[int], Sample] = getattr(videos, "open", videos.read)

    def __len__(self) -> int:
        return len(self.videos) * self.clips

    def path(self, index: int) -> Path:
        """The file of the video that clip `index` is of."""
        find: Callable[[int], Path] = self.videos.path  # type: ignore[attr-defined]  # all data sets of videos have it
        return find(index // self.clips)

    def open(self, index: int) -> Sample:
        """The video, not decoded, with its number and that of the clip."""
        video, clip = divmod(index, self.clips)
        return {**self._open(video), "video": video, "clip": clip}

    def read(self, index: int) -> Sample:
        """The same: a video is decoded by the transform that chooses frames."""
        return self.open(index)


def clips_apart(videos: Dataset, first_transform: object) -> Dataset:
    """The data set as its first transform wants it: videos, or each clip of them apart."""
    clips: int = getattr(first_transform, "samples_per_video", 1)
    return ClipsApart(videos, clips) if clips > 1 else videos


def joined(dataset: Dataset) -> Dataset:
    """The data set with a sample for each video, where it has one for each clip."""
    return dataset.videos if isinstance(dataset, ClipsApart) else dataset
