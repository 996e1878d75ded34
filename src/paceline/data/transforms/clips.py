"""Clips of videos: which frames a model gets to see, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import Count
from paceline.core.errors import ArgumentError, DataError
from paceline.core.registry import register
from paceline.data.argument_types import PositiveRange
from paceline.data.batch import Sample
from paceline.data.io.video import EncodedVideo

Short = Literal["loop", "last", "refuse"]
"""What is done where a video ends before its clip: begin again, repeat the last frame, or refuse the video."""
Stride = Count | Literal["whole"]
Numbers = NDArray[np.int64]


@register.transform("clip")
@dataclass(frozen=True)
class Clip:
    """One clip of a video, "image" uint8 [T, H, W, 3]: `frames` frames, `stride` apart, from a random place.

    With `stride` "whole" the frames are spread over the whole video, with a common random shift. `speed` is a range:
    the stride is multiplied with a factor drawn from it. With `place` "middle" nothing is drawn: the clip lies in
    the middle and its speed is that of the middle of the range.
    """

    frames: Count
    stride: Stride = 1
    speed: PositiveRange = (1.0, 1.0)
    place: Literal["random", "middle"] = "random"
    short: Short = "loop"
    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = False
    reads_encoded: ClassVar[bool] = True
    makes_clips: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.stride == "whole" and list(self.speed) != [1.0, 1.0]:
            raise ArgumentError("speed", "multiplies a stride that is a number; take it out where stride is whole")

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        """The sample with its clip."""
        video = _video(sample, "clip")
        faster, place = (0.5, 0.5) if self.place == "middle" else draws.tolist()
        speed = self.speed[0] + (self.speed[1] - self.speed[0]) * faster
        _refuse_short(video, self.frames, self.stride, self.short, speed)
        return {
            **sample,
            "image": video.frames(choose(video.num_frames, self.frames, self.stride, place, self.short, speed)),
        }


@register.transform("multi_clip")
@dataclass(frozen=True)
class MultiClip:
    """Several clips of a video, evenly spread from its beginning to its end, "image" uint8 [V, T, H, W, 3].

    V views of one sample: a batch of them is [N, V, C, T, H, W], and a task averages what a model says of the views
    to one prediction for each video. A single clip lies in the middle. With `apart` each clip is a sample of its own,
    [T, H, W, 3], the one that "clip" in the sample tells; the prediction is that of all clips of the video none the
    less.
    """

    clips: Count
    frames: Count
    stride: Stride = 1
    short: Short = "loop"
    apart: bool = False
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False
    reads_encoded: ClassVar[bool] = True
    makes_clips: ClassVar[bool] = True

    @property
    def samples_a_video(self) -> int:
        """How many samples a data set has for each video."""
        return self.clips if self.apart else 1

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        """The sample with its clips, or with the one that it is."""
        video = _video(sample, "multi_clip")
        _refuse_short(video, self.frames, self.stride, self.short)
        chosen = [choose(video.num_frames, self.frames, self.stride, place, self.short) for place in self._places()]
        if "clip" in sample:
            rest = {name: value for name, value in sample.items() if name != "clip"}
            return {**rest, "image": video.frames(chosen[sample["clip"]])}
        pixels = video.frames(np.concatenate(chosen))  # together, so that what clips share is decoded once
        return {**sample, "image": pixels.reshape(self.clips, self.frames, *pixels.shape[1:])}

    def _places(self) -> list[float]:
        if self.stride == "whole" or self.clips == 1:
            return [(view + 0.5) / self.clips for view in range(self.clips)]
        return [view / (self.clips - 1) for view in range(self.clips)]


def choose(num_frames: int, frames: int, stride: Stride, place: float, short: Short, speed: float = 1.0) -> Numbers:
    """The numbers of the frames of a clip, [frames], of a video that has `num_frames`.

    `place` goes from 0, the first clip that the video has room for, to 1, the last one. A video without room for one
    is taken from its first frame on. Spread over the whole video, `place` is a shift within the share of a frame.
    """
    if stride == "whole":
        spread = ((np.arange(frames) + place) * (num_frames / frames)).astype(np.int64)
        return np.minimum(spread, num_frames - 1)
    offsets = (np.arange(frames) * (stride * speed)).astype(np.int64)
    room = num_frames - 1 - int(offsets[-1])
    if room < 0:
        return offsets % num_frames if short == "loop" else np.minimum(offsets, num_frames - 1)
    return offsets + min(int(place * (room + 1)), room)


def require_clips(dataset: object, transforms: Sequence[object]) -> None:
    """Raise ValueError if a data set is one of videos and its first transform does not choose frames of them."""
    chooses = bool(transforms) and getattr(transforms[0], "makes_clips", False)
    if getattr(dataset, "reads_videos", False) and not chooses:
        raise ValueError(
            "a data set of videos needs a first transform that chooses frames of them: add"
            " {name: clip, frames: 16, stride: 2} for training, or"
            " {name: multi_clip, clips: 10, frames: 16, stride: 2} for evaluation"
        )


def _refuse_short(video: EncodedVideo, frames: int, stride: Stride, short: Short, speed: float = 1.0) -> None:
    needed = frames if stride == "whole" else 1 + int((frames - 1) * (stride * speed))
    if short == "refuse" and video.num_frames < needed:
        raise DataError(
            f"{video.path}: has {video.num_frames} frames, and a clip takes {needed}; remove it, make the clip"
            " shorter, or let it begin again (short: loop) or stand still (short: last)"
        )


def _video(sample: Sample, name: str) -> EncodedVideo:
    video: Any = sample["image"]
    if not isinstance(video, EncodedVideo):
        raise DataError(
            f"{name} chooses frames of a video that is not decoded yet, and found {_kind(video)}; it has to be the"
            " first transform of a data set of videos"
        )
    return video


def _kind(image: Any) -> str:
    return f"pixels {list(image.shape)}" if isinstance(image, np.ndarray) else "an image file"
