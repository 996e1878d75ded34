"""Affine transforms: rotate, scale, translate and shear, and the crop around a person for pose networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from paceline.core.arguments import Positive, Share
from paceline.core.registry import register
from paceline.data.argument_types import Degrees, Fill, HeightWidth, PixelValue, PositiveRange
from paceline.data.batch import RAGGED, Sample
from paceline.data.transforms.annotations import AffineMatrix, Floats
from paceline.data.transforms.functional import Draws, between, size_of, warp_affine


@register.transform("random_rotation")
@dataclass(frozen=True)
class RandomRotation:
    """Rotate around the center by up to `degrees` either way; the size stays, and corners are filled."""

    degrees: Degrees
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    draws: ClassVar[int] = 1

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        matrix = self.matrix(*size_of(sample), draws)
        return warp_affine(sample, matrix, size_of(sample), self.fill, self.mask_fill, self.min_visible)

    def matrix(self, height: int, width: int, draws: Draws) -> AffineMatrix:
        """Where an image of this size is moved."""
        center = (width / 2, height / 2)
        return affine_matrix(center, center, between(draws[0], -self.degrees, self.degrees))


@register.transform("random_affine")
@dataclass(frozen=True)
class RandomAffine:
    """Rotate, translate, scale and shear at random, around the center; the size stays.

    `degrees` and `shear` (of the upright direction, in degrees) are drawn either way; so is `translate`, as shares of
    the width and of the height; `scale` is uniform in its logarithm.
    """

    degrees: Degrees = 0.0
    translate: Annotated[Sequence[Share], Field(min_length=2, max_length=2)] = (0.0, 0.0)
    scale: PositiveRange = (1.0, 1.0)
    shear: Annotated[float, Field(ge=0, le=80)] = 0.0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    draws: ClassVar[int] = 5

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        height, width = size_of(sample)
        center = (width / 2, height / 2)
        across = between(draws[2], -self.translate[0], self.translate[0]) * width
        down = between(draws[3], -self.translate[1], self.translate[1]) * height
        matrix = affine_matrix(
            center,
            (center[0] + across, center[1] + down),
            between(draws[0], -self.degrees, self.degrees),
            draw_scale(draws[1], self.scale),
            between(draws[4], -self.shear, self.shear),
        )
        return warp_affine(sample, matrix, (height, width), self.fill, self.mask_fill, self.min_visible)


@register.transform("pose_crop")
@dataclass(frozen=True)
class PoseCrop:
    """Crop the first object to a fixed size, as pose networks take it, and remove all others.

    Its box, else the box around its keypoints, else the image, is widened to the aspect of `size` and by the factor
    `margin`, then scaled and rotated at random. "matrix" float32 [2, 3] leads from the new image back to the one that
    was read.
    """

    size: HeightWidth
    margin: Positive = 1.25
    scale: PositiveRange = (1.0, 1.0)
    degrees: Degrees = 0.0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    draws: ClassVar[int] = 2

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        height, width = self.size
        first = {name: value[:1] if name in RAGGED else value for name, value in sample.items()}
        left, top, right, bottom = (float(bound) for bound in _first_box(first))
        margin = self.margin * draw_scale(draws[1], self.scale)
        pixels = max((right - left) / width, (bottom - top) / height, 1 / max(height, width)) * margin
        matrix = affine_matrix(
            ((left + right) / 2, (top + bottom) / 2),
            (width / 2, height / 2),
            between(draws[0], -self.degrees, self.degrees),
            1 / pixels,
        )
        first.setdefault("matrix", np.eye(2, 3, dtype=np.float32))
        return warp_affine(first, matrix, (height, width), self.fill, self.mask_fill)


def affine_matrix(
    center: tuple[float, float],
    target: tuple[float, float],
    degrees: float,
    scale: float = 1.0,
    shear: float = 0.0,
) -> AffineMatrix:
    """The matrix that shears, scales and rotates (clockwise) around `center`, and moves that to `target`; both x, y."""
    angle, slant = math.radians(degrees), math.tan(math.radians(shear))
    cosine, sine = scale * math.cos(angle), scale * math.sin(angle)
    linear = np.array([[cosine, -sine], [sine, cosine]]) @ np.array([[1, slant], [0, 1]])
    return np.column_stack([linear, np.array(target) - linear @ np.array(center)])


def draw_scale(draw: float, bounds: Sequence[float]) -> float:
    """A factor between bounds, uniform in its logarithm."""
    return math.exp(between(draw, math.log(bounds[0]), math.log(bounds[1])))


def _first_box(sample: Sample) -> Floats:
    """The box to crop, as x1 y1 x2 y2."""
    if len(sample.get("boxes", ())):
        box: Floats = sample["boxes"][0]
        return box
    if len(sample.get("keypoints", ())):
        labeled = sample["keypoints"][0][sample["keypoints"][0][:, 2] > 0, :2]
        if len(labeled):
            return np.concatenate([labeled.min(0), labeled.max(0)])
    height, width = size_of(sample)
    return np.array([0, 0, width, height], np.float32)
