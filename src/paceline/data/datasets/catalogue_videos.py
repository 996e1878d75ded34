"""The data sets of videos that recipes can name, and the transforms that choose frames of them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.core.arguments import Arguments, Count, CountOrZero, Positive
from paceline.core.registry import register
from paceline.data.argument_types import Name, PositiveRange
from paceline.data.datasets.catalogue_lists import Column, ListArguments

datasets = register.kind("dataset")
transforms = register.kind("transform")

Shares = Annotated[dict[Name, Positive], Field(min_length=1)]


class VideoFolderArguments(Arguments):
    """Arguments of `video_folder`."""

    root: Name
    split: Name | None = None
    extensions: Annotated[list[Annotated[str, Field(pattern=r"^\.")]], Field(min_length=1)] | None = None
    split_shares: Shares | None = None
    split_seed: CountOrZero = 0
    follow_links: bool = False
    max_pixels: Count = 67_108_864
    max_frames: Count = 1_000_000

    @model_validator(mode="after")
    def _a_part_that_is_drawn(self) -> Self:
        _check_part(self.split, self.split_shares)
        return self


class VideoListArguments(ListArguments):
    """Arguments of `video_list`."""

    video: Column | None = None
    split_shares: Shares | None = None  # of any sum
    max_pixels: Count = 67_108_864
    max_frames: Count = 1_000_000


def _check_part(split: str | None, shares: dict[str, float] | None) -> None:
    if shares is not None and split not in shares:
        raise ValueError(f"split has to be one of split_shares, which are {', '.join(shares)}")


class ClipArguments(Arguments):
    """Arguments of `clip`."""

    frames: Count
    stride: Count | Literal["whole"] = 1
    speed: PositiveRange = [1.0, 1.0]
    place: Literal["random", "middle"] = "random"
    short: Literal["loop", "last", "refuse"] = "loop"

    @model_validator(mode="after")
    def _speed_of_a_stride(self) -> Self:
        if self.stride == "whole" and self.speed != [1.0, 1.0]:
            raise ValueError("speed multiplies a stride that is a number; with whole there is none")
        return self


class MultiClipArguments(Arguments):
    """Arguments of `multi_clip`."""

    clips: Count
    frames: Count
    stride: Count | Literal["whole"] = 1
    short: Literal["loop", "last", "refuse"] = "loop"
    apart: bool = False


datasets.add(
    "video_folder",
    "paceline.data.datasets.videos:VideoFolder",
    VideoFolderArguments,
    "video files, a folder a class",
)
datasets.add(
    "video_list",
    "paceline.data.datasets.videos:VideoList",
    VideoListArguments,
    "video files that a list names, with labels and perhaps folds",
)

transforms.add(
    "clip",
    "paceline.data.transforms.clips:Clip",
    ClipArguments,
    "choose frames of a video, at a random place and speed or in the middle",
)
transforms.add(
    "multi_clip",
    "paceline.data.transforms.clips:MultiClip",
    MultiClipArguments,
    "choose several clips of a video, spread evenly, as views of one sample or apart",
)
