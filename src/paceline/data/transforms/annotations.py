"""Boxes, keypoints and masks of objects, moved as their image is: of one sample (NumPy) or of a batch (torch).

Coordinates are continuous: an image of width W spans 0 to W, and the center of its first pixel is at 0.5. An affine
matrix is float64 [2, 3]: (x, y) goes to `matrix[:, :2] @ (x, y) + matrix[:, 2]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.world import constant
from paceline.data.batch import RAGGED, Sample

AffineMatrix = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]
Pairs = Sequence[Sequence[int]] | None
"""Keypoints that are left and right of a kind, by number."""
Array = TypeVar("Array", Floats, Tensor)

_PLACED = RAGGED - {"classes", "crowd"}  # fields that change as an image is moved


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


def flip_boxes(boxes: Array, width: int) -> Array:
    """Boxes [..., 4] of an image of that width, flipped horizontally."""
    flipped = _take(boxes, [2, 1, 0, 3], -1)
    flipped[..., ::2] = width - flipped[..., ::2]
    return flipped


def flip_keypoints(keypoints: Array, width: int, pairs: Pairs) -> Array:
    """Keypoints [..., J, 3] flipped horizontally; those of each pair exchange their numbers."""
    if pairs is None:
        raise DataError(
            "keypoints cannot be flipped: the data set does not say which are left and right; set its `pairs`"
        )
    order = list(range(keypoints.shape[-2]))
    for left, right in pairs:
        if max(left, right) >= len(order):
            raise DataError(f"the pair {left}, {right} is beyond the {len(order)} keypoints, which count from 0")
        order[left], order[right] = right, left
    flipped = _take(keypoints, order, -2)
    flipped[..., 0] = (width - flipped[..., 0]) * (flipped[..., 2] > 0)
    return flipped


def _take(values: Array, places: Sequence[int], axis: int) -> Array:
    """A copy with the values of an axis in this order; a list as an index of a tensor would wait for its device."""
    if isinstance(values, Tensor):
        return values.index_select(axis, constant(places, values.device))
    return values.take(places, axis)


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


# Batches: the objects of all samples at once, one scale and offset a sample.


def flip_batch_annotations(batch: Mapping[str, Any], is_flipped: Tensor, width: int, pairs: Pairs) -> dict[str, Any]:
    """The "matrix" and the objects of a batch whose samples `is_flipped` [N], of images this wide, are flipped."""
    result: dict[str, Any] = {}
    if "matrix" in batch:
        sides = torch.stack([is_flipped, torch.zeros_like(is_flipped)], 1).float()
        result["matrix"] = _update_matrices(batch["matrix"], 1 - 2 * sides, sides * width)
    if RAGGED.isdisjoint(batch):
        return result
    counts, owners = _owners(batch, is_flipped.device)
    chosen = is_flipped[owners]
    found = {name: torch.cat(batch[name]) for name in ("boxes", "keypoints", "masks") if name in batch}
    if "boxes" in found:
        found["boxes"] = torch.where(chosen[:, None], flip_boxes(found["boxes"], width), found["boxes"])
    if "keypoints" in found:
        flipped = flip_keypoints(found["keypoints"], width, pairs)
        found["keypoints"] = torch.where(chosen[:, None, None], flipped, found["keypoints"])
    if "masks" in found:
        found["masks"] = flip_where(found["masks"], chosen)
    return result | {name: list(value.split_with_sizes(counts)) for name, value in found.items()}


def flip_where(images: Tensor, is_flipped: Tensor) -> Tensor:
    """Images [N, ..., W], those of `is_flipped` [N] flipped horizontally."""
    count = len(images)
    # Copying whole images out of both versions is several times faster than choosing pixel by pixel.
    chosen = torch.arange(count, device=images.device).add_(is_flipped, alpha=count)
    return torch.cat([images, images.flip(-1)]).index_select(0, chosen)


def move_batch_annotations(
    batch: Mapping[str, Any],
    scales: Tensor,
    offsets: Tensor,
    size: tuple[int, int],
    move_masks: Callable[[Tensor, Tensor], Tensor],
    min_visible: float | None = None,
) -> dict[str, Any]:
    """The "matrix" and the objects of a batch, (x, y) moved to scales · (x, y) + offsets, both [N or 1, 2].

    What `transform_annotations` says of clipping and removing holds. `move_masks` is given all masks and the number of
    the sample of each.
    """
    result: dict[str, Any] = {}
    if "matrix" in batch:
        result["matrix"] = _update_matrices(batch["matrix"], scales, offsets)
    if RAGGED.isdisjoint(batch):
        return result
    counts, owners = _owners(batch, offsets.device)
    by, to = (each.expand(len(counts), 2)[owners] for each in (scales, offsets))
    names = _PLACED if min_visible is None else RAGGED
    found = {name: torch.cat(batch[name]) for name in batch if name in names}
    visible = torch.ones(len(owners), device=offsets.device)
    if "boxes" in found:
        boxes = found["boxes"] * by.repeat(1, 2) + to.repeat(1, 2)
        found["boxes"] = boxes.clamp(
            torch.zeros_like(boxes), constant([size[1], size[0]] * 2, boxes.device, boxes.dtype)
        )
        visible = _visible_share_of_batch(boxes, found["boxes"])
    if "masks" in found:
        masks = move_masks(found["masks"], owners)
        whole, rest = (each.flatten(1).count_nonzero(1) for each in (found["masks"], masks))
        share = (rest / (whole * by.prod(1)).clamp(min=1e-9)).clamp(max=1)
        visible = torch.where(whole > 0, share, visible)
        found["masks"] = masks
    if "keypoints" in found:
        found["keypoints"] = _move_keypoints(found["keypoints"], by, to, size)
    if "area" in found:
        found["area"] = found["area"] * by.prod(1) * (visible if min_visible is not None else 1.0)
    if min_visible is not None:
        kept = (visible > 0) & (visible >= min_visible)
        counts = torch.bincount(owners[kept], minlength=len(counts)).tolist()
        found = {name: value[kept.to(value.device)] for name, value in found.items()}
    return result | {name: list(value.split_with_sizes(counts)) for name, value in found.items()}


def _owners(batch: Mapping[str, Any], device: torch.device) -> tuple[list[int], Tensor]:
    """How many objects each sample has, and each object's sample: [K of all]."""
    name = next(name for name in batch if name in RAGGED)
    counts = [len(each) for each in batch[name]]
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts), output_size=sum(counts))
    return counts, owners.to(device, non_blocking=True)


def _update_matrices(matrices: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """Matrices [N, 2, 3] back to the images that were read, of images whose (x, y) became scales · (x, y) + offsets."""
    linear = matrices[:, :, :2] / scales.unsqueeze(1)
    return torch.cat([linear, matrices[:, :, 2:] - linear @ offsets.unsqueeze(2)], 2)


def _move_keypoints(keypoints: Tensor, by: Tensor, to: Tensor, size: tuple[int, int]) -> Tensor:
    points = keypoints[..., :2] * by[:, None] + to[:, None]
    is_inside = (points >= 0).all(2) & (points[..., 0] < size[1]) & (points[..., 1] < size[0]) & (keypoints[..., 2] > 0)
    return torch.cat([points, keypoints[..., 2:]], 2) * is_inside[..., None]


def _visible_share_of_batch(whole: Tensor, inside: Tensor) -> Tensor:
    is_inside = ((whole - inside).abs() < 1e-3).all(1)
    before, after = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) for boxes in (whole, inside))
    return torch.where(is_inside, 1.0, (after / before.clamp(min=1e-9)).clamp(0, 1))
