"""Boxes, keypoints and masks of the objects of a sample, moved as their image is.

Coordinates are continuous: an image of width W spans 0 to W, and the center of its first pixel is at 0.5. An affine
matrix is float64 [2, 3]: (x, y) goes to `matrix[:, :2] @ (x, y) + matrix[:, 2]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.batch import RAGGED, Sample

AffineMatrix = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]
Pairs = Sequence[Sequence[int]] | None
"""Keypoints that are left and right of a kind, by number."""


class CropBox(NamedTuple):
    """A rectangle of an image, in its pixels; it may reach beyond the image."""

    top: float
    left: float
    height: float
    width: float

    def matrix_to(self, height: int, width: int) -> AffineMatrix:
        """The matrix that maps the box onto an image of that size."""
        across, down = width / self.width, height / self.height
        return np.array([[across, 0, -self.left * across], [0, down, -self.top * down]])


def compose_affine(second: Floats, first: Floats) -> AffineMatrix:
    """The matrix that applies `first`, then `second`."""
    linear = second[:, :2] @ first[:, :2]
    return np.column_stack([linear, second[:, :2] @ first[:, 2] + second[:, 2]])


def invert_affine(matrix: Floats) -> AffineMatrix:
    """The inverse of an affine matrix."""
    linear = np.linalg.inv(matrix[:, :2].astype(np.float64))
    return np.column_stack([linear, -linear @ matrix[:, 2]])


def transform_points(matrix: AffineMatrix, points: Floats) -> Floats:
    """Points [..., 2] as x, y, moved."""
    return points @ matrix[:, :2].T + matrix[:, 2]


def transform_boxes(matrix: AffineMatrix, boxes: Floats) -> Floats:
    """The boxes [K, 4] around the moved corners of boxes."""
    corners = transform_points(matrix, boxes[:, [[0, 1], [2, 1], [2, 3], [0, 3]]].astype(np.float64))
    return np.concatenate([corners.min(1), corners.max(1)], 1)


def transform_annotations(
    sample: Sample,
    matrix: AffineMatrix,
    size: tuple[int, int],
    masks: NDArray[np.uint8] | None = None,
    min_visible: float | None = None,
) -> Sample:
    """The sample with its objects moved by `matrix` into an image of that height and width, where `masks` are theirs.

    Boxes are clipped to the image; keypoints outside count as not labeled. Objects of which nothing, or a share below
    `min_visible`, is left are removed with all their fields; with None, all stay. A sample's "matrix", which maps its
    image back to the one that was read, is updated.
    """
    moved = dict(sample)
    if "matrix" in sample:
        moved["matrix"] = compose_affine(sample["matrix"], invert_affine(matrix)).astype(np.float32)
    if RAGGED.isdisjoint(sample):
        return moved
    height, width = size
    scale = abs(float(np.linalg.det(matrix[:, :2])))
    visible = np.ones(_num_objects(sample))
    if "boxes" in sample:
        whole = transform_boxes(matrix, sample["boxes"])
        moved["boxes"] = np.clip(whole, 0, [width, height, width, height]).astype(np.float32)
        visible = _visible_share(whole, moved["boxes"])
    if masks is not None:
        moved["masks"] = masks
        visible = _visible_pixels(sample["masks"], masks, scale, visible)
        if "boxes" in sample and (matrix[0, 1] or matrix[1, 0]):
            moved["boxes"] = _masks_to_boxes(masks, moved["boxes"])
    if "keypoints" in sample:
        moved["keypoints"] = _transform_keypoints(sample["keypoints"], matrix, height, width)
    if "area" in sample:
        share = visible if min_visible is not None else 1.0
        moved["area"] = (sample["area"] * (scale * share)).astype(np.float32)
    return moved if min_visible is None else select_objects(moved, (visible > 0) & (visible >= min_visible))


def select_objects(sample: Sample, chosen: NDArray[np.bool_]) -> Sample:
    """The sample with the chosen ones of its objects."""
    if chosen.all():
        return sample
    return {name: value[chosen] if name in RAGGED else value for name, value in sample.items()}


def flip_boxes(boxes: Floats, width: int) -> Floats:
    """Boxes [..., 4] of an image of that width, flipped horizontally."""
    flipped = boxes.take([2, 1, 0, 3], -1)
    flipped[..., ::2] = width - flipped[..., ::2]
    return flipped


def flip_keypoints(keypoints: Floats, width: int, pairs: Pairs) -> Floats:
    """Keypoints [..., J, 3] flipped horizontally; those of each pair exchange their numbers."""
    if pairs is None:
        raise DataError(
            "keypoints cannot be flipped: the data set does not say which are left and right; set its `flip_pairs`"
        )
    order = list(range(keypoints.shape[-2]))
    for left, right in pairs:
        if max(left, right) >= len(order):
            raise DataError(f"the pair {left}, {right} is beyond the {len(order)} keypoints, which count from 0")
        order[left], order[right] = right, left
    flipped = keypoints.take(order, -2)
    flipped[..., 0] = (width - flipped[..., 0]) * (flipped[..., 2] > 0)
    return flipped


def box_area(boxes: Floats) -> Floats:
    """The areas of boxes [K, 4]; 0 of inverted ones."""
    return np.maximum(boxes[:, 2] - boxes[:, 0], 0) * np.maximum(boxes[:, 3] - boxes[:, 1], 0)


def _num_objects(sample: Sample) -> int:
    return len(next(value for name, value in sample.items() if name in RAGGED))


def _visible_share(whole: Floats, inside: Floats) -> NDArray[np.float64]:
    """How much of each box is left; one without area is left if it lies inside."""
    before = box_area(whole)
    is_inside = np.abs(whole - inside).max(1, initial=0) < 1e-3
    share = np.divide(box_area(inside), before, out=np.zeros(len(whole)), where=before > 0)
    return np.where(is_inside, 1.0, np.minimum(share, 1))


def _visible_pixels(
    before: NDArray[np.uint8], after: NDArray[np.uint8], scale: float, default: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How much of each scaled mask is left; `default` for masks that were empty."""
    visible = default.copy()
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        whole = np.count_nonzero(one)
        if whole:
            visible[number] = min(1.0, np.count_nonzero(other) / (whole * scale))
    return visible


def _masks_to_boxes(masks: NDArray[np.uint8], default: NDArray[np.float32]) -> NDArray[np.float32]:
    """The boxes around masks; the default ones where a mask is empty."""
    boxes = default.copy()
    for box, mask in zip(boxes, masks, strict=True):
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if len(rows):
            box[:] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    return boxes


def _transform_keypoints(
    keypoints: NDArray[np.float32], matrix: AffineMatrix, height: int, width: int
) -> NDArray[np.float32]:
    points = transform_points(matrix, keypoints[..., :2].astype(np.float64)).astype(np.float32)
    is_inside = (points >= 0).all(-1) & (points < [width, height]).all(-1) & (keypoints[..., 2] > 0)
    return np.concatenate([points, keypoints[..., 2:]], -1) * is_inside[..., None]
