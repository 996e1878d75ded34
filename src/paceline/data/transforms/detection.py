"""Transforms that detectors such as SSD are trained with: zoom out and IoU crop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.core.arguments import AtMost, Count, Ordered, Positive, PositiveShare, Share
from paceline.core.registry import register
from paceline.data.argument_types import Fill, PixelValue
from paceline.data.batch import Sample
from paceline.data.transforms.annotations import CropBox, Floats, box_area, select_objects
from paceline.data.transforms.functional import Draws, between, crop, size_of

_TWO = Field(min_length=2, max_length=2)
AtLeastOne = Annotated[float, Field(ge=1)]


@register.transform("random_zoom_out")
@dataclass(frozen=True)
class RandomZoomOut:
    """With probability `p`, place the image on a canvas whose sides are longer by a factor from `side_range`."""

    fill: Fill = 0
    side_range: Annotated[Sequence[AtLeastOne], _TWO, Ordered()] = (1.0, 4.0)
    p: Share = 0.5
    mask_fill: PixelValue = 0
    draws: ClassVar[int] = 4

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        if draws[0] >= self.p:
            return dict(sample)
        height, width = size_of(sample)
        ratio = between(draws[1], *self.side_range)
        rows, columns = int(height * ratio), int(width * ratio)
        top = int(float(draws[2]) * (rows - height + 1))
        left = int(float(draws[3]) * (columns - width + 1))
        return crop(sample, CropBox(-top, -left, rows, columns), self.fill, self.mask_fill)


@register.transform(
    "random_iou_crop",
    checks=[AtMost("min_scale", "max_scale"), AtMost("min_aspect_ratio", "max_aspect_ratio")],
)
@dataclass(frozen=True)
class RandomIoUCrop:
    """Crop a part that overlaps an object enough, and keep the objects whose center lies in it.

    The least overlap (intersection over union) of the part and an object is one of `sampler_options`, each as likely; 1
    leaves the image whole. Sides are drawn as shares of the image's, from `min_scale` to `max_scale`, with an aspect
    ratio (width / height) in its range. If none of `trials` parts fits, the image stays whole, as it does where there
    are no objects.
    """

    min_scale: PositiveShare = 0.3
    max_scale: PositiveShare = 1.0
    min_aspect_ratio: Positive = 0.5
    max_aspect_ratio: Positive = 2.0
    sampler_options: Annotated[Sequence[Share], Field(min_length=1)] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    trials: Count = 40

    @property
    def draws(self) -> int:
        """Which option, and the sides and the corner of each part that is tried."""
        return 1 + 4 * self.trials

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        least = self.sampler_options[int(float(draws[0]) * len(self.sampler_options))]
        boxes = sample.get("boxes", ())
        if least >= 1 or not len(boxes):
            return dict(sample)
        parts = self._parts(*size_of(sample), draws[1:].reshape(self.trials, 4))
        contained = _contains_center(parts, boxes)
        is_enough = (contained & (_box_iou(parts, boxes) >= least)).any(1)
        if not is_enough.any():
            return dict(sample)
        chosen = int(is_enough.argmax())
        left, top, right, bottom = (int(bound) for bound in parts[chosen])
        box = CropBox(top, left, bottom - top, right - left)
        return crop(select_objects(sample, contained[chosen]), box, min_visible=0.0)

    def _parts(self, height: int, width: int, draws: Draws) -> Floats:
        """Candidates of whole pixels with an aspect in its range, as boxes [at most `trials`, 4]."""
        low, high = self.min_scale, self.max_scale
        extents = np.maximum(1, np.floor((low + (high - low) * draws[:, :2]) * [width, height]))
        corners = np.floor(draws[:, 2:] * (np.array([width, height]) - extents + 1))
        aspect = extents[:, 0] / extents[:, 1]
        fitting = (aspect >= self.min_aspect_ratio) & (aspect <= self.max_aspect_ratio)
        parts: Floats = np.concatenate([corners, corners + extents], 1)[fitting]
        return parts


def _contains_center(parts: Floats, boxes: Floats) -> NDArray[np.bool_]:
    """Which part holds the center of which box: [parts, boxes]."""
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2
    within = (centers > parts[:, None, :2]) & (centers < parts[:, None, 2:])
    return within[..., 0] & within[..., 1]


def _box_iou(parts: Floats, boxes: Floats) -> Floats:
    """Intersection over union of each part and each box: [parts, boxes]."""
    shared = np.minimum(parts[:, None, 2:], boxes[:, 2:]) - np.maximum(parts[:, None, :2], boxes[:, :2])
    common = np.maximum(shared, 0).prod(2)
    iou: Floats = common / (box_area(parts)[:, None] + box_area(boxes) - common)
    return iou
