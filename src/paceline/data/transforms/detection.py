"""The two changes of scale that single-shot detectors are trained with: zooming out, and a crop with objects."""

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
from paceline.data.transforms.affine import between
from paceline.data.transforms.coordinates import Numbers, Window, areas, select_objects, size_of
from paceline.data.transforms.functional import frame

Draws = NDArray[np.float64]
AtLeastOne = Annotated[float, Field(ge=1)]


@register.transform("random_zoom_out")
@dataclass(frozen=True)
class RandomZoomOut:
    """With probability `p`, place the image on a canvas whose sides are longer by a factor from `side_range`."""

    fill: Fill = 0
    side_range: Annotated[Sequence[AtLeastOne], Field(min_length=2, max_length=2), Ordered()] = (1.0, 4.0)
    p: Share = 0.5
    mask_fill: PixelValue = 0
    draws: ClassVar[int] = 4
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, perhaps on a larger canvas."""
        if draws[0] >= self.p:
            return dict(sample)
        height, width = size_of(sample)
        ratio = between(draws[1], *self.side_range)
        rows, columns = int(height * ratio), int(width * ratio)
        top = int(float(draws[2]) * (rows - height + 1))
        left = int(float(draws[3]) * (columns - width + 1))
        return frame(sample, Window(-top, -left, rows, columns), self.fill, self.mask_fill)


@register.transform(
    "random_iou_crop",
    checks=[AtMost("min_scale", "max_scale"), AtMost("min_aspect_ratio", "max_aspect_ratio")],
)
@dataclass(frozen=True)
class RandomIoUCrop:
    """Cut out a part that overlaps an object enough, and keep the objects whose middle it holds.

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
    is_batch: ClassVar[bool] = False

    @property
    def draws(self) -> int:
        """Which option, and the sides and the corner of each part that is tried."""
        return 1 + 4 * self.trials

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample's part, or the whole sample."""
        least = self.sampler_options[int(float(draws[0]) * len(self.sampler_options))]
        boxes = sample.get("boxes", ())
        if least >= 1 or not len(boxes):
            return dict(sample)
        parts = self._parts(*size_of(sample), draws[1:].reshape(self.trials, 4))
        held = _holds_middle(parts, boxes)
        suits = (held & (_overlaps(parts, boxes) >= least)).any(1)
        if not suits.any():
            return dict(sample)
        chosen = int(suits.argmax())
        left, top, right, bottom = (int(bound) for bound in parts[chosen])
        window = Window(top, left, bottom - top, right - left)
        return frame(select_objects(sample, held[chosen]), window, min_visible=0.0)

    def _parts(self, height: int, width: int, draws: Draws) -> Numbers:
        """Candidates of whole pixels with an aspect in its range, as boxes [at most `trials`, 4]."""
        low, high = self.min_scale, self.max_scale
        extents = np.maximum(1, np.floor((low + (high - low) * draws[:, :2]) * [width, height]))
        corners = np.floor(draws[:, 2:] * (np.array([width, height]) - extents + 1))
        aspect = extents[:, 0] / extents[:, 1]
        fitting = (aspect >= self.min_aspect_ratio) & (aspect <= self.max_aspect_ratio)
        parts: Numbers = np.concatenate([corners, corners + extents], 1)[fitting]
        return parts


def _holds_middle(parts: Numbers, boxes: Numbers) -> NDArray[np.bool_]:
    """Which part holds the middle of which box: [parts, boxes]."""
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    within = (middles > parts[:, None, :2]) & (middles < parts[:, None, 2:])
    return within[..., 0] & within[..., 1]


def _overlaps(parts: Numbers, boxes: Numbers) -> Numbers:
    """Intersection over union of each part and each box: [parts, boxes]."""
    shared = np.minimum(parts[:, None, 2:], boxes[:, 2:]) - np.maximum(parts[:, None, :2], boxes[:, :2])
    common = np.maximum(shared, 0).prod(2)
    overlaps: Numbers = common / (areas(parts)[:, None] + areas(boxes) - common)
    return overlaps
