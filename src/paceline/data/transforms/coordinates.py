"""Where things come to lie when an image is cut, scaled, turned or mirrored: boxes, keypoints and areas.

Coordinates are continuous: an image of width W spans 0 to W, and the middle of its first pixel is at 0.5. A map is
float64 [2, 3]: a place (x, y) goes to `map[:, :2] @ (x, y) + map[:, 2]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.batch import RAGGED, Sample

Map = NDArray[np.float64]
Numbers = NDArray[np.floating[Any]]
Array = TypeVar("Array", Numbers, Tensor)


class Window(NamedTuple):
    """A rectangle of an image, in its pixels; it may reach beyond the image."""

    top: float
    left: float
    height: float
    width: float

    def onto(self, height: int, width: int) -> Map:
        """The map under which the window becomes an image of that size."""
        across, down = width / self.width, height / self.height
        return np.array([[across, 0, -self.left * across], [0, down, -self.top * down]])


def size_of(sample: Sample) -> tuple[int, int]:
    """Height and width of a sample's image, whether it is decoded or not."""
    image = sample["image"]
    if isinstance(image, np.ndarray):
        return image.shape[-3], image.shape[-2]
    return image.height, image.width


def middle(length: int, wanted: int) -> int:
    """Where a middle stretch begins, half of an odd rest being cut as torchvision does; before 0 if it is longer."""
    return round((length - wanted) / 2) if length >= wanted else -((wanted - length) // 2)


def place_objects(
    sample: Sample,
    mapping: Map,
    height: int,
    width: int,
    masks: NDArray[np.uint8] | None = None,
    min_visible: float | None = None,
) -> Sample:
    """The sample with its objects moved by `mapping` into an image of that size, where `masks` are theirs.

    Boxes are cut at the border; keypoints beyond it count as not labeled. Objects of which nothing, or a share below
    `min_visible`, is left are removed with all their fields; with None, all stay. A sample's "matrix", the way back
    from its image to the one that was read, is kept right.
    """
    moved = dict(sample)
    if "matrix" in sample:
        moved["matrix"] = compose(sample["matrix"], invert(mapping)).astype(np.float32)
    if RAGGED.isdisjoint(sample):
        return moved
    scale = abs(float(np.linalg.det(mapping[:, :2])))
    visible = np.ones(_count(sample))
    if "boxes" in sample:
        whole = map_boxes(mapping, sample["boxes"])
        moved["boxes"] = inside = _clip(whole, height, width).astype(np.float32)
        visible = _visible_share(whole, inside)
    if masks is not None:
        moved["masks"] = masks
        visible = _visible_pixels(sample["masks"], masks, scale, visible)
        if "boxes" in sample and (mapping[0, 1] or mapping[1, 0]):
            moved["boxes"] = _tight(masks, moved["boxes"])
    if "keypoints" in sample:
        moved["keypoints"] = _place_keypoints(sample["keypoints"], mapping, height, width)
    share = visible if min_visible is not None else 1.0
    if "area" in sample:
        moved["area"] = (sample["area"] * (scale * share)).astype(np.float32)
    return moved if min_visible is None else select_objects(moved, (visible > 0) & (visible >= min_visible))


def select_objects(sample: Sample, chosen: NDArray[np.bool_]) -> Sample:
    """The sample with the chosen ones of its objects."""
    if chosen.all():
        return sample
    return {name: value[chosen] if name in RAGGED else value for name, value in sample.items()}


def compose(second: Numbers, first: Numbers) -> Map:
    """The map that does what `first` does, then what `second` does."""
    linear = second[:, :2] @ first[:, :2]
    return np.column_stack([linear, second[:, :2] @ first[:, 2] + second[:, 2]])


def invert(mapping: Numbers) -> Map:
    """The way back."""
    linear = np.linalg.inv(mapping[:, :2].astype(np.float64))
    return np.column_stack([linear, -linear @ mapping[:, 2]])


def map_points(mapping: Map, points: Numbers) -> Numbers:
    """Places [..., 2] as x, y, moved."""
    return points @ mapping[:, :2].T + mapping[:, 2]


def map_boxes(mapping: Map, boxes: Numbers) -> Numbers:
    """The boxes [K, 4] that surround the moved corners of boxes."""
    corners = map_points(mapping, boxes[:, [[0, 1], [2, 1], [2, 3], [0, 3]]].astype(np.float64))
    return np.concatenate([corners.min(1), corners.max(1)], 1)


def mirror_boxes(boxes: Array, width: int) -> Array:
    """Boxes [..., 4] of an image of that width whose left and right are exchanged."""
    mirrored = boxes[..., [2, 1, 0, 3]]
    mirrored[..., ::2] = width - mirrored[..., ::2]
    return mirrored


def mirror_keypoints(keypoints: Array, width: int, pairs: Sequence[Sequence[int]]) -> Array:
    """Keypoints [..., J, 3] likewise; those of each pair, left and right of a kind, exchange their numbers."""
    order = list(range(keypoints.shape[-2]))
    for left, right in pairs:
        if max(left, right) >= len(order):
            raise DataError(f"the pair {left}, {right} is beyond the {len(order)} keypoints, which count from 0")
        order[left], order[right] = right, left
    mirrored = keypoints[..., order, :]
    mirrored[..., 0] = (width - mirrored[..., 0]) * (mirrored[..., 2] > 0)
    return mirrored


def areas(boxes: Numbers) -> Numbers:
    """Of boxes [K, 4]; 0 of those that are turned inside out."""
    return np.maximum(boxes[:, 2] - boxes[:, 0], 0) * np.maximum(boxes[:, 3] - boxes[:, 1], 0)


def _count(sample: Sample) -> int:
    return len(next(value for name, value in sample.items() if name in RAGGED))


def _clip(boxes: Numbers, height: int, width: int) -> Numbers:
    return np.clip(boxes, 0, [width, height, width, height])


def _visible_share(whole: Numbers, inside: Numbers) -> NDArray[np.float64]:
    """How much of each box is left; one without area is left if it lies inside."""
    before = areas(whole)
    untouched = np.abs(whole - inside).max(1, initial=0) < 1e-3
    share = np.divide(areas(inside), before, out=np.zeros(len(whole)), where=before > 0)
    return np.where(untouched, 1.0, np.minimum(share, 1))


def _visible_pixels(
    before: NDArray[np.uint8], after: NDArray[np.uint8], scale: float, otherwise: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How much of each mask is left of what scaling makes of it; `otherwise` for masks that were empty."""
    visible = otherwise.copy()
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        whole = np.count_nonzero(one)
        if whole:
            visible[number] = min(1.0, np.count_nonzero(other) / (whole * scale))
    return visible


def _tight(masks: NDArray[np.uint8], boxes: NDArray[np.float32]) -> NDArray[np.float32]:
    """The boxes that surround masks; the given ones where a mask is empty."""
    tight = boxes.copy()
    for box, mask in zip(tight, masks, strict=True):
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if len(rows):
            box[:] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    return tight


def _place_keypoints(keypoints: NDArray[np.float32], mapping: Map, height: int, width: int) -> NDArray[np.float32]:
    places = map_points(mapping, keypoints[..., :2].astype(np.float64)).astype(np.float32)
    inside = (places >= 0).all(-1) & (places < [width, height]).all(-1) & (keypoints[..., 2] > 0)
    return np.concatenate([places, keypoints[..., 2:]], -1) * inside[..., None]
