"""The two changes of scale that single-shot detectors are trained with: a larger canvas, and a part with objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.batch import Sample
from paceline.data.transforms.affine import between
from paceline.data.transforms.geometry import Numbers, Window, areas, select_objects, size_of
from paceline.data.transforms.joint import frame
from paceline.data.transforms.pixels import Fill

Draws = NDArray[np.float64]
_TRIALS = 40


@dataclass(frozen=True)
class Expand:
    """With the given chance, lay the image somewhere on a canvas whose sides are longer by a factor from `ratio`."""

    chance: float = 0.5
    ratio: Sequence[float] = (1.0, 4.0)
    fill: Fill = 0
    mask_fill: int = 0
    draws: ClassVar[int] = 4
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, perhaps on a larger canvas."""
        if draws[0] >= self.chance:
            return dict(sample)
        height, width = size_of(sample)
        ratio = between(draws[1], self.ratio[0], self.ratio[1])
        rows, columns = int(height * ratio), int(width * ratio)
        top = int(float(draws[2]) * (rows - height + 1))
        left = int(float(draws[3]) * (columns - width + 1))
        return frame(sample, Window(-top, -left, rows, columns), self.fill, self.mask_fill)


@dataclass(frozen=True)
class RandomIouCrop:
    """Cut out a part that overlaps an object enough, and keep the objects whose middle it holds.

    The least overlap (intersection over union) of the part and an object is one of `overlaps`, or, just as likely, the
    image stays whole. Sides are drawn as shares of the image's in `sides`, with an `aspect` (width / height) in its
    range. If none of 40 parts suits, the image stays whole too, as it does where there are no objects.
    """

    overlaps: Sequence[float] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    sides: Sequence[float] = (0.3, 1.0)
    aspect: Sequence[float] = (0.5, 2.0)
    draws: ClassVar[int] = 1 + 4 * _TRIALS
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample's part, or the whole sample."""
        choice = int(float(draws[0]) * (len(self.overlaps) + 1))
        boxes = sample.get("boxes", ())
        if choice == len(self.overlaps) or not len(boxes):
            return dict(sample)
        parts = self._parts(*size_of(sample), draws[1:].reshape(_TRIALS, 4))
        held = _holds_middle(parts, boxes)
        suits = (held & (_overlaps(parts, boxes) >= self.overlaps[choice])).any(1)
        if not suits.any():
            return dict(sample)
        chosen = int(suits.argmax())
        left, top, right, bottom = (int(bound) for bound in parts[chosen])
        window = Window(top, left, bottom - top, right - left)
        return frame(select_objects(sample, held[chosen]), window, min_visible=0.0)

    def _parts(self, height: int, width: int, draws: Draws) -> Numbers:
        """Candidates of whole pixels with an aspect in its range, as boxes [at most 40, 4]."""
        low, high = self.sides
        extents = np.maximum(1, np.floor((low + (high - low) * draws[:, :2]) * [width, height]))
        corners = np.floor(draws[:, 2:] * (np.array([width, height]) - extents + 1))
        aspect = extents[:, 0] / extents[:, 1]
        fitting = (aspect >= self.aspect[0]) & (aspect <= self.aspect[1])
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
