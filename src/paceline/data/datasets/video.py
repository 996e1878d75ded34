"""Videos with labels: one folder per class, or named by a list file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from paceline.core.arguments import CountOrZero, KeyOf
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import ClassNames, Column, Delimiter, Name, SplitShares
from paceline.data.batch import Sample
from paceline.data.datasets.image_folder import ClassFolders
from paceline.data.datasets.list_file import LIST_CHECKS, ListFile
from paceline.data.index.list_file import Format
from paceline.data.io.video import EXTENSIONS, EncodedVideo


@register.dataset("video_folder", checks=[KeyOf("split", "split_shares")])
class VideoFolder(ClassFolders):
    """Videos under root/split/class/, or root/class/ without a split, at any depth below their class.

    Classes and videos are numbered in the order of their names. With `split_shares` the split is drawn. A sample's
    "image" is an EncodedVideo, of which the first transform chooses frames.
    """

    reads_videos = True
    kind, example = "video", "video.mp4"
    usual_extensions = EXTENSIONS

    def open(self, index: int) -> Sample:
        """The video, not decoded, and its label."""
        return {"image": EncodedVideo(self._checked_path(index)), "label": self._label(index)}


@register.dataset("video_list", checks=LIST_CHECKS)
class VideoList(ListFile):
    """The videos of a list, a line each: names relative to `root`, the list's own folder unless given, and labels.

    The list and its columns are as those of `list_file`, with `video` for the column of names, or a pattern of several
    columns: Kinetics is "{youtube_id}_{time_start:06}_{time_end:06}.mp4". A sample's "image" is an EncodedVideo, of
    which the first transform chooses frames.
    """

    reads_videos = True
    kind = "video"

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
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        follow_links: bool = False,
        delimiter: Delimiter | None = None,
        label_from: Literal["column", "folder"] = "column",
        first_label: CountOrZero = 0,
        split_column: Column | None = None,
        stratify: bool = True,
    ) -> None:
        columns = video, label, label_separator
        labels, parts = (delimiter, label_from, first_label), (split, split_shares, split_seed)
        part_columns = split_column, fold, fold_column
        super().__init__(file, root, format, *columns, classes, *parts, follow_links, *labels, *part_columns, stratify)

    def open(self, index: int) -> Sample:
        """The video, not decoded, and its label if the list has labels."""
        return {"image": self._load(index, self._open_video)} | self._label(index)

    def _open_video(self, path: Path) -> EncodedVideo:
        if not path.exists():
            raise DataError(f"{path}: no such file")
        return EncodedVideo(path)
