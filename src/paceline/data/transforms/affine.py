"""Transforms of single samples that turn, scale, shift and shear, and the crop around a person for poses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.core.arguments import Positive, Share
from paceline.core.registry import register
from paceline.data.argument_types import Degrees, Fill, HeightWidth, PixelValue, PositiveRange
from paceline.data.batch import RAGGED, Sample
from paceline.data.transforms.coordinates import Map, Numbers, size_of
from paceline.data.transforms.functional import warp

Draws = NDArray[np.float64]


@register.transform("random_rotation")
@dataclass(frozen=True)
class RandomRotation:
    """Turn around the middle by up to `degrees` either way; the size stays, and corners are filled."""

    degrees: Degrees
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, turned."""
        height, width = size_of(sample)
        middle = (width / 2, height / 2)
        mapping = move_around(middle, middle, between(draws[0], -self.degrees, self.degrees))
        return warp(sample, mapping, height, width, self.fill, self.mask_fill, self.min_visible)


@register.transform("random_affine")
@dataclass(frozen=True)
class RandomAffine:
    """Turn, scale, shear and shift at random, around the middle; the size stays.

    `degrees` and `shear` (of the upright direction, in degrees) are drawn either way, `translate` too, as a share of
    the height and of the width; `scale` is uniform in its logarithm.
    """

    degrees: Degrees = 0.0
    scale: PositiveRange = (1.0, 1.0)
    translate: Share = 0.0
    shear: Annotated[float, Field(ge=0, le=80)] = 0.0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    draws: ClassVar[int] = 5
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, moved."""
        height, width = size_of(sample)
        middle = (width / 2, height / 2)
        across = between(draws[2], -self.translate, self.translate) * width
        down = between(draws[3], -self.translate, self.translate) * height
        mapping = move_around(
            middle,
            (middle[0] + across, middle[1] + down),
            between(draws[0], -self.degrees, self.degrees),
            draw_scale(draws[1], self.scale),
            between(draws[4], -self.shear, self.shear),
        )
        return warp(sample, mapping, height, width, self.fill, self.mask_fill, self.min_visible)


@register.transform("pose_crop")
@dataclass(frozen=True)
class PoseCrop:
    """Bring the first object to a fixed size, as pose networks take it, and leave out all others.

    Its box, else the box around its keypoints, else the image, is widened to the aspect of `size` and by the factor
    `margin`, then scaled and turned at random. "matrix" float32 [2, 3] leads from the new image back to the one that
    was read.
    """

    size: HeightWidth
    margin: Positive = 1.25
    scale: PositiveRange = (1.0, 1.0)
    degrees: Degrees = 0.0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample around its first object."""
        height, width = self.size
        first = {name: value[:1] if name in RAGGED else value for name, value in sample.items()}
        left, top, right, bottom = (float(bound) for bound in _surroundings(first))
        shown = self.margin * draw_scale(draws[1], self.scale)
        pixels = max((right - left) / width, (bottom - top) / height, 1 / max(height, width)) * shown
        mapping = move_around(
            ((left + right) / 2, (top + bottom) / 2),
            (width / 2, height / 2),
            between(draws[0], -self.degrees, self.degrees),
            1 / pixels,
        )
        first.setdefault("matrix", np.eye(2, 3, dtype=np.float32))
        return warp(first, mapping, height, width, self.fill, self.mask_fill)


def move_around(
    middle: tuple[float, float],
    target: tuple[float, float],
    degrees: float,
    scale: float = 1.0,
    shear: float = 0.0,
) -> Map:
    """The map that shears, scales and turns (clockwise) around `middle`, and brings that to `target`; both x, y."""
    angle, slant = math.radians(degrees), math.tan(math.radians(shear))
    cosine, sine = scale * math.cos(angle), scale * math.sin(angle)
    linear = np.array([[cosine, -sine], [sine, cosine]]) @ np.array([[1, slant], [0, 1]])
    return np.column_stack([linear, np.array(target) - linear @ np.array(middle)])


def between(draw: float, low: float, high: float) -> float:
    """A number from `low` to `high` for a draw from 0 to 1."""
    return low + (high - low) * float(draw)


def draw_scale(draw: float, bounds: Sequence[float]) -> float:
    """The same, uniform in its logarithm."""
    return math.exp(between(draw, math.log(bounds[0]), math.log(bounds[1])))


def _surroundings(sample: Sample) -> Numbers:
    """The box to show, as x1 y1 x2 y2."""
    if len(sample.get("boxes", ())):
        box: Numbers = sample["boxes"][0]
        return box
    if len(sample.get("keypoints", ())):
        labeled = sample["keypoints"][0][sample["keypoints"][0][:, 2] > 0, :2]
        if len(labeled):
            return np.concatenate([labeled.min(0), labeled.max(0)])
    height, width = size_of(sample)
    return np.array([0, 0, width, height], np.float32)
