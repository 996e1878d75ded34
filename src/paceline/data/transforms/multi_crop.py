"""Several crops of a clip as views of one sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import Count
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import Sample
from paceline.data.transforms.coordinates import size_of

_MIDDLE = Fraction(1, 2)


@register.transform("multi_crop")
@dataclass(frozen=True)
class MultiCrop:
    """Cut squares of `size` out of a clip, spread evenly along its longer side, in the middle of its shorter one.

    A clip [T, H, W, C] becomes the views [crops, T, size, size, C]; of V clips each gets its crops, V × crops views in
    all. A task averages what a model says of the views to one prediction for each video.
    """

    size: Count
    crops: Count = 3
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        """The sample with its views."""
        image: NDArray[np.uint8] = sample["image"]
        height, width = size_of(sample)
        if image.ndim < 4:
            raise DataError(f"multi_crop cuts clips of videos, and found an image of {width}×{height}")
        if min(height, width) < self.size:
            raise DataError(
                f"multi_crop cuts squares of {self.size} pixels, and found frames of {width}×{height}; add"
                f" {{name: resize, size: {self.size}}} before it"
            )
        clips = image if image.ndim == 5 else image[None]
        views = [self._cut(clip, number) for clip in clips for number in range(self.crops)]
        return {**sample, "image": np.stack(views)}

    def _cut(self, clip: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
        height, width = clip.shape[1:3]
        place = Fraction(number, self.crops - 1) if self.crops > 1 else _MIDDLE
        across, down = (place, _MIDDLE) if width >= height else (_MIDDLE, place)
        # Half pixels are rounded up, as in the evaluation of SlowFast.
        top, left = math.ceil((height - self.size) * down), math.ceil((width - self.size) * across)
        return clip[:, top : top + self.size, left : left + self.size]
