"""The objects of a batch (boxes, masks, keypoints), moved as its images are: those of all samples at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.argument_types import Fill
from paceline.data.batch import RAGGED
from paceline.data.transforms.coordinates import mirror_boxes, mirror_keypoints
from paceline.data.transforms.pixels import fill_values

Fields = dict[str, Any]


def retrace(matrices: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """Maps [N, 2, 3] that led back from images before these were moved: (x, y) to scales · (x, y) + offsets [N, 2]."""
    linear = matrices[:, :, :2] / scales.unsqueeze(1)
    return torch.cat([linear, matrices[:, :, 2:] - linear @ offsets.unsqueeze(2)], 2)


def has_objects(batch: Mapping[str, Any]) -> bool:
    """Whether there is anything here to move."""
    return not RAGGED.isdisjoint(batch)


def mirror_objects(
    batch: Mapping[str, Any], flipped: Tensor, width: int, pairs: Sequence[Sequence[int]] | None
) -> Fields:
    """The fields of objects with left and right exchanged in the samples `flipped` [N] of images this wide.

    The keypoints of each pair, a left and a right one of a kind, change their numbers.
    """
    counts, owners = _owners(batch, flipped.device)
    turned = flipped[owners]
    found: Fields = {}
    if "boxes" in batch:
        boxes = torch.cat(batch["boxes"])
        found["boxes"] = torch.where(turned[:, None], mirror_boxes(boxes, width), boxes)
    if "keypoints" in batch:
        keypoints = torch.cat(batch["keypoints"])
        mirrored = mirror_keypoints(keypoints, width, _known(pairs))
        found["keypoints"] = torch.where(turned[:, None, None], mirrored, keypoints)
    if "masks" in batch:
        found["masks"] = either(torch.cat(batch["masks"]), turned)
    return {name: list(value.split(counts)) for name, value in found.items()}


def either(images: Tensor, flipped: Tensor) -> Tensor:
    """Those of images [N, ..., W] that are `flipped` [N], mirrored, and the others as they are."""
    count = len(images)
    # Copying whole images out of both versions is several times faster than choosing pixel by pixel.
    chosen = torch.arange(count, device=images.device).add_(flipped, alpha=count)
    return torch.cat([images, images.flip(-1)]).index_select(0, chosen)


def shift(
    batch: Mapping[str, Any],
    by: Tensor,
    size: tuple[int, int],
    move_masks: Callable[[Tensor, Tensor], Tensor],
    min_visible: float = 0.0,
) -> Fields:
    """The fields of objects moved by x and y [N, 2] pixels, within images of this height and width.

    Boxes are cut at the border, and objects of which nothing or less than `min_visible` is left are removed; keypoints
    outside count as not labeled; an area shrinks as its object does. `move_masks` is given all masks and the number of
    the sample of each.
    """
    counts, owners = _owners(batch, by.device)
    found: Fields = {name: torch.cat(batch[name]) for name in RAGGED if name in batch}
    moved = by[owners]
    height, width = size
    visible = torch.ones(len(owners), dtype=torch.float64, device=by.device)
    if "boxes" in found:
        boxes = found["boxes"] + moved.repeat(1, 2)
        found["boxes"] = boxes.clamp(torch.zeros_like(boxes), boxes.new_tensor([width, height] * 2))
        visible = _visible_share(boxes, found["boxes"])
    if "masks" in found:
        masks = move_masks(found["masks"], owners)
        visible = _visible_pixels(found["masks"], masks, visible)
        found["masks"] = masks
    if "keypoints" in found:
        found["keypoints"] = _labelled_inside(found["keypoints"], moved, height, width)
    if "area" in found:
        found["area"] = (found["area"] * visible).to(found["area"].dtype)
    kept = (visible > 0) & (visible >= min_visible)
    counts = torch.bincount(owners[kept], minlength=len(counts)).tolist()
    return {name: list(value[kept].split(counts)) for name, value in found.items()}


class CropSide(NamedTuple):
    """One side of a crop out of padded images."""

    length: int
    wanted: int
    margin: int
    """Pixels that are padded before the first one."""
    places: int
    """Where the crop may begin, counted from the first padded pixel."""

    @property
    def behind(self) -> int:
        """Pixels that are padded behind the last one."""
        return self.places - 1 + self.wanted - self.margin - self.length


def crop_padded(images: Tensor, corners: Tensor, sides: tuple[CropSide, CropSide], fill: Fill) -> Tensor:
    """The parts at corners [N, 2] of the padded images [N, ..., H, W]."""
    down, across = sides
    if not len(images):
        return images.new_empty(*images.shape[:-2], down.wanted, across.wanted)
    pads = (across.margin, across.behind, down.margin, down.behind)
    padded = _padded(images, pads, fill).contiguous()
    # Each row of the result is neighbors in memory: copying rows is faster than indexing pixels.
    stride, plane = padded.shape[-1], padded.shape[-2] * padded.shape[-1]
    planes = torch.arange(0, padded.numel(), plane, device=images.device).view(len(images), -1)
    starts = planes + (corners[:, :1] * stride + corners[:, 1:])
    rows = starts.unsqueeze(-1) + torch.arange(0, down.wanted * stride, stride, device=images.device)
    windows = padded.as_strided((padded.numel() - across.wanted + 1, across.wanted), (1, 1))
    return windows.index_select(0, rows.view(-1)).view(*images.shape[:-2], down.wanted, across.wanted)


def _padded(images: Tensor, pads: tuple[int, int, int, int], fill: Fill) -> Tensor:
    if isinstance(fill, int):
        return F.pad(images, pads, value=fill)
    axis = channel_axis(images)
    values = fill_values(fill, images.shape[axis])
    planes = zip(images.unbind(axis), values, strict=True)
    return torch.stack([F.pad(plane, pads, value=value) for plane, value in planes], axis)


def scale(batch: Mapping[str, Any], across: float, down: float, resize_masks: Callable[[Tensor], Tensor]) -> Fields:
    """The fields of objects in images that are scaled by these factors."""
    counts, _ = _owners(batch, torch.device("cpu"))
    found: Fields = {}
    if "boxes" in batch:
        boxes = torch.cat(batch["boxes"])
        found["boxes"] = boxes * boxes.new_tensor([across, down, across, down])
    if "keypoints" in batch:
        keypoints = torch.cat(batch["keypoints"])
        found["keypoints"] = keypoints * keypoints.new_tensor([across, down, 1])
    if "area" in batch:
        found["area"] = torch.cat(batch["area"]) * (across * down)
    if "masks" in batch:
        found["masks"] = resize_masks(torch.cat(batch["masks"]))
    return {name: list(value.split(counts)) for name, value in found.items()}


def _owners(batch: Mapping[str, Any], device: torch.device) -> tuple[list[int], Tensor]:
    """How many objects each sample has, and each object's sample: [K of all]."""
    name = next(name for name in batch if name in RAGGED)
    counts = [len(each) for each in batch[name]]
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return counts, owners.to(device)


def _known(pairs: Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]]:
    if pairs is None:
        raise DataError("keypoints cannot be mirrored: the data set does not say which are left and right of a kind")
    return pairs


def _labelled_inside(keypoints: Tensor, moved: Tensor, height: int, width: int) -> Tensor:
    places = keypoints[..., :2] + moved[:, None]
    inside = (places >= 0).all(2) & (places[..., 0] < width) & (places[..., 1] < height) & (keypoints[..., 2] > 0)
    return torch.cat([places, keypoints[..., 2:]], 2) * inside[..., None]


def _visible_share(whole: Tensor, inside: Tensor) -> Tensor:
    """How much of each box is left; one without area is left if it lies inside."""
    whole, inside = whole.double(), inside.double()
    untouched = ((whole - inside).abs() < 1e-3).all(1)
    share = _areas(inside) / _areas(whole).clamp(min=1e-9)
    return torch.where(untouched, 1.0, share.clamp(0, 1))


def _visible_pixels(before: Tensor, after: Tensor, otherwise: Tensor) -> Tensor:
    """How much of each mask is left; `otherwise` for masks that were empty."""
    whole, rest = (masks.flatten(1).count_nonzero(1) for masks in (before, after))
    return torch.where(whole > 0, rest.double() / whole.clamp(min=1), otherwise)


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def channel_axis(images: Tensor) -> int:
    """Behind the samples, or behind the views of each if there are several."""
    return 1 if images.ndim < 6 else 2
