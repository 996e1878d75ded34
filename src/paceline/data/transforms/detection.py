"""Transforms that detectors are trained with: zoom out, IoU crop (SSD) and mosaic (YOLO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.core.arguments import AtMost, Count, Ordered, Positive, PositiveShare, Share
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import Fill, PixelValue
from paceline.data.batch import RAGGED, Sample
from paceline.data.transforms.annotations import CropBox, Floats, box_area, select_objects, transform_annotations
from paceline.data.transforms.functional import Draws, between, crop, height_and_width, resized_crop, size_of

_TWO = Field(min_length=2, max_length=2)
AtLeastOne = Annotated[float, Field(ge=1)]
AtLeastTwo = Annotated[int, Field(ge=2)]


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


@register.transform("mosaic")
@dataclass(frozen=True)
class Mosaic:
    """Lay four images around a point of a canvas of `size`, each fitted into half of its height and width.

    The point is drawn from the central half of the canvas; one corner of each image touches it, what reaches beyond
    the canvas is cut off, and what nothing covers is filled. Objects of which less than `min_visible` is left are
    removed. With twice the final size, cut down by what follows, objects keep about their scale. It happens with
    probability `p`; else the sample stays as it is, so a transform that gives one size has to follow.
    """

    size: AtLeastTwo | Annotated[Sequence[AtLeastTwo], _TWO]
    p: Share = 1.0
    fill: Fill = 114
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    others: ClassVar[int] = 3
    draws: ClassVar[int] = 3
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: Draws, others: Sequence[Sample]) -> Sample:
        """The four as one: the sample above and left of the point, the `others` right of it, below, and both."""
        if draws[0] >= self.p:
            return dict(sample)
        if "label" in sample:
            raise DataError("mosaic joins images with their objects, but a label is of one image alone: leave it out")
        canvas = height_and_width(self.size)
        row, column = (_central(side, float(draw)) for side, draw in zip(canvas, draws[1:], strict=True))
        tiles = [
            self._tile(each, canvas, row, column, is_below=number > 1, is_right=number % 2 == 1)
            for number, each in enumerate([sample, *others])
        ]
        joined = {name: value for name, value in sample.items() if name != "matrix"}
        joined["image"] = _join(tiles, "image", -3, -2)
        if "mask" in sample:
            joined["mask"] = _join(tiles, "mask", -2, -1)
        return joined | {name: np.concatenate([tile[name] for tile in tiles]) for name in RAGGED.intersection(sample)}

    def _tile(
        self, sample: Sample, canvas: tuple[int, int], row: int, column: int, is_below: bool, is_right: bool
    ) -> Sample:
        """One of the four as its part of the canvas shows it, with objects where they are on the whole canvas."""
        height, width = size_of(sample)
        factor = min(canvas[0] / height, canvas[1] / width) / 2
        rows, columns = max(1, round(height * factor)), max(1, round(width * factor))
        fitted = resized_crop(sample, CropBox(0, 0, height, width), rows, columns)
        top, part_height = (0, canvas[0] - row) if is_below else (rows - row, row)
        left, part_width = (0, canvas[1] - column) if is_right else (columns - column, column)
        box = CropBox(top, left, part_height, part_width)
        tile = crop(fitted, box, self.fill, self.mask_fill, self.min_visible)
        start = row if is_below else 0, column if is_right else 0
        matrix = np.array([[1.0, 0, start[1]], [0, 1, start[0]]])
        return transform_annotations(tile, matrix, canvas, _on_canvas(tile, start, canvas))


def _central(side: int, draw: float) -> int:
    """A place in the central half of a side, with a pixel at least before and after it."""
    return min(max(1, int(side * (0.25 + 0.5 * draw))), side - 1)


def _join(tiles: Sequence[Sample], name: str, down: int, across: int) -> NDArray[np.uint8]:
    above, below = (np.concatenate([tile[name] for tile in pair], across) for pair in (tiles[:2], tiles[2:]))
    return np.concatenate([above, below], down)


def _on_canvas(tile: Sample, start: tuple[int, int], canvas: tuple[int, int]) -> NDArray[np.uint8] | None:
    """The masks of a part, on the whole canvas."""
    if "masks" not in tile:
        return None
    masks: NDArray[np.uint8] = tile["masks"]
    whole = np.zeros((len(masks), *canvas), np.uint8)
    whole[:, start[0] : start[0] + masks.shape[1], start[1] : start[1] + masks.shape[2]] = masks
    return whole
