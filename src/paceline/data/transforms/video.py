"""Video transforms: which frames and which crops of them a model sees, in training and in evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import Count
from paceline.core.errors import ArgumentError, DataError
from paceline.core.registry import register
from paceline.data.argument_types import PositiveRange
from paceline.data.batch import Sample
from paceline.data.io.video import EncodedVideo
from paceline.data.transforms.functional import Draws, between, size_of

Short = Literal["loop", "last"]
"""What to do where a video ends before its clip: begin again, or repeat the last frame."""
Stride = Count | Literal["whole"]
_CENTER = Fraction(1, 2)


@register.transform("clip")
@dataclass(frozen=True)
class Clip:
    """One clip of a video, "image" uint8 [T, H, W, 3]: `num_frames` frames, `stride` apart, from a random place.

    With `stride` "whole" the frames are spread over the whole video, with a common random shift. `speed` is a range:
    the stride is multiplied by a factor drawn from it. With `position` "center" nothing is drawn: the clip lies in the
    center and its speed is that of the middle of the range.
    """

    num_frames: Count
    stride: Stride = 1
    speed: PositiveRange = (1.0, 1.0)
    position: Literal["random", "center"] = "random"
    short: Short = "loop"
    draws: ClassVar[int] = 2
    reads_encoded: ClassVar[bool] = True
    makes_clips: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.stride == "whole" and list(self.speed) != [1.0, 1.0]:
            raise ArgumentError("speed", "multiplies a stride that is a number; take it out where stride is whole")

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        video = _video(sample, "clip")
        drawn_speed, position = (0.5, 0.5) if self.position == "center" else draws.tolist()
        speed = between(drawn_speed, *self.speed)
        chosen = frame_numbers(video.num_frames, self.num_frames, self.stride, position, self.short, speed)
        return {**sample, "image": video.frames(chosen)}


@register.transform("multi_clip")
@dataclass(frozen=True)
class MultiClip:
    """Several clips of a video, evenly spread from its beginning to its end, "image" uint8 [V, T, H, W, 3].

    V views of one sample: a batch of them is [N, V, C, T, H, W], and a task averages the outputs of the views to one
    prediction for each video. A single clip lies in the center.
    """

    num_clips: Count
    num_frames: Count
    stride: Stride = 1
    short: Short = "loop"
    draws: ClassVar[int] = 0
    reads_encoded: ClassVar[bool] = True
    makes_clips: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        video = _video(sample, "multi_clip")
        about = video.num_frames, self.num_frames, self.stride
        chosen = [frame_numbers(*about, position, self.short) for position in self._positions()]
        pixels = video.frames(np.concatenate(chosen))  # together, so that what clips share is decoded once
        return {**sample, "image": pixels.reshape(self.num_clips, self.num_frames, *pixels.shape[1:])}

    def _positions(self) -> list[float]:
        if self.stride == "whole" or self.num_clips == 1:
            return [(view + 0.5) / self.num_clips for view in range(self.num_clips)]
        return [view / (self.num_clips - 1) for view in range(self.num_clips)]


@register.transform("multi_crop")
@dataclass(frozen=True)
class MultiCrop:
    """Crop squares of `size` from a clip, spread evenly along its longer side, in the center of its shorter one.

    A clip [T, H, W, C] becomes the views [num_crops, T, size, size, C]; of V clips each gets its crops, V × num_crops
    views in all. A task averages the outputs of the views to one prediction for each video.
    """

    size: Count
    num_crops: Count = 3
    draws: ClassVar[int] = 0

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        image: NDArray[np.uint8] = sample["image"]
        height, width = size_of(sample)
        if image.ndim < 4:
            raise DataError(f"multi_crop takes clips of videos; this is an image of {width}×{height}")
        if min(height, width) < self.size:
            raise DataError(
                f"multi_crop takes squares of {self.size} pixels, and the frames are {width}×{height}; add"
                f" {{name: resize, size: {self.size}}} before it"
            )
        clips = image if image.ndim == 5 else image[None]
        views = [self._crop(clip, number) for clip in clips for number in range(self.num_crops)]
        return {**sample, "image": np.stack(views)}

    def _crop(self, clip: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
        height, width = clip.shape[1:3]
        position = Fraction(number, self.num_crops - 1) if self.num_crops > 1 else _CENTER
        across, down = (position, _CENTER) if width >= height else (_CENTER, position)
        # Half pixels are rounded up, as in the evaluation of SlowFast.
        top, left = math.ceil((height - self.size) * down), math.ceil((width - self.size) * across)
        return clip[:, top : top + self.size, left : left + self.size]


def frame_numbers(
    length: int, num_frames: int, stride: Stride, position: float, short: Short, speed: float = 1.0
) -> NDArray[np.int64]:
    """The numbers of the frames of a clip, [num_frames], of a video of `length` frames.

    `position` goes from 0, the first clip that the video has room for, to 1, the last one. A video without room for one
    is taken from its first frame on. Spread over the whole video, `position` is a shift within the share of a frame.
    """
    if stride == "whole":
        spread = ((np.arange(num_frames) + position) * (length / num_frames)).astype(np.int64)
        return np.minimum(spread, length - 1)
    offsets = (np.arange(num_frames) * (stride * speed)).astype(np.int64)
    room = length - 1 - int(offsets[-1])
    if room < 0:
        return offsets % length if short == "loop" else np.minimum(offsets, length - 1)
    return offsets + min(int(position * (room + 1)), room)


def require_clips(dataset: object, transforms: Sequence[object]) -> None:
    """Raise ValueError if a data set is one of videos and its first transform does not choose frames of them."""
    chooses = bool(transforms) and getattr(transforms[0], "makes_clips", False)
    if getattr(dataset, "reads_videos", False) and not chooses:
        raise ValueError(
            "a data set of videos needs a first transform that chooses frames of them: add"
            " {name: clip, num_frames: 16, stride: 2} for training, or"
            " {name: multi_clip, num_clips: 10, num_frames: 16, stride: 2} for evaluation"
        )


@dataclass(frozen=True)
class DecodedVideo:
    """All frames of a video, [T, H, W, C], as a data set of a user's gives them."""

    pixels: NDArray[Any]

    @property
    def num_frames(self) -> int:
        """How many frames there are."""
        return len(self.pixels)

    def frames(self, numbers: Sequence[int] | NDArray[np.int64]) -> NDArray[Any]:
        """These frames, in this order."""
        return np.asarray(self.pixels[np.asarray(numbers, np.int64)])


def _video(sample: Sample, name: str) -> EncodedVideo | DecodedVideo:
    video: Any = sample["image"]
    if isinstance(video, EncodedVideo):
        return video
    if isinstance(video, np.ndarray) and video.ndim == 4 and len(video):
        return DecodedVideo(video)
    found = f"pixels {list(video.shape)}" if isinstance(video, np.ndarray) else "an image file"
    raise DataError(
        f"{name} chooses frames of a video, and found {found}; it has to be the first transform of a data set of videos"
    )
