"""Transforms of whole batches of images of one size, on the training device; all are deterministic.

Images are [N, C, H, W], clips [N, C, T, H, W], of whole pixels or of float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.recycling import recycled
from paceline.data.transforms.batch_objects import either, has_objects, mirror, retrace, shift

_LARGE = 1 << 18  # numbers of a batch whose memory is worth using again


@dataclass(frozen=True)
class Flip:
    """Mirror left and right with the given chance, masks and objects too; clips as a whole.

    `pairs` are the numbers of keypoints that are left and right of a kind: a mirrored left hand is a right one.
    """

    chance: float = 0.5
    pairs: Sequence[Sequence[int]] | None = None
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = True
    keeps_counts: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The batch, some of its samples mirrored."""
        images, flipped = batch["image"], draws[:, 0] < self.chance
        result = {**batch, "image": either(images, flipped)}
        if "mask" in batch:
            result["mask"] = either(batch["mask"], flipped)
        if has_objects(batch):
            result |= mirror(batch, flipped, images.shape[-1], self.pairs)
        if "matrix" in batch:
            sides = torch.stack([flipped, torch.zeros_like(flipped)], 1).float()
            result["matrix"] = retrace(batch["matrix"], 1 - 2 * sides, sides * images.shape[-1])
        return result


@dataclass(frozen=True)
class RandomCrop:
    """Surround with `padding` zeros, a mask with `mask_fill`, and cut the old size out again at a random place.

    Boxes are cut at the border; an object whose box lies outside is left out, and a keypoint there is not labelled.
    """

    padding: int
    mask_fill: int = 0
    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The batch, each sample shifted by up to `padding` pixels either way."""
        images = batch["image"]
        corners = (draws * (2 * self.padding + 1)).long()
        result = {**batch, "image": self._cut(images, corners)}
        if "mask" in batch:
            result["mask"] = self._cut(batch["mask"], corners, self.mask_fill)
        if not has_objects(batch) and "matrix" not in batch:
            return result
        by = (self.padding - corners).flip(1).float()
        if "matrix" in batch:
            result["matrix"] = retrace(batch["matrix"], torch.ones_like(by), by)
        if has_objects(batch):
            result |= shift(batch, by, images.shape[-2:], lambda masks, owners: self._cut(masks, corners[owners]))
        return result

    def _cut(self, images: Tensor, corners: Tensor, fill: int = 0) -> Tensor:
        """Windows at corners [N, 2] of the padded images [N, ..., H, W]."""
        if not len(images):
            return images
        height, width = images.shape[-2:]
        padded = F.pad(images, (self.padding,) * 4, value=fill).contiguous()
        # Each row of the result is `width` neighbours in memory: copying rows is faster than indexing pixels.
        stride, plane = padded.shape[-1], padded.shape[-2] * padded.shape[-1]
        planes = torch.arange(0, padded.numel(), plane, device=images.device).view(len(images), -1)
        starts = planes + (corners[:, :1] * stride + corners[:, 1:])
        rows = starts.unsqueeze(-1) + torch.arange(0, height * stride, stride, device=images.device)
        windows = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
        return windows.index_select(0, rows.view(-1)).view_as(images)


@dataclass(frozen=True)
class RandomErasing:
    """Paint over a random rectangle of some images, in all channels and frames; masks and objects stay as they are.

    `area` is the share of the image that is hidden, `aspect` is height / width, uniform in its logarithm, and
    `value` is in the units that the images have at this point.
    """

    chance: float
    area: Sequence[float] = (0.02, 0.33)
    aspect: Sequence[float] = (0.3, 3.3)
    value: float = 0
    draws: ClassVar[int] = 5
    is_batch: ClassVar[bool] = True
    keeps_counts: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The batch, some of its images with a rectangle of `value`."""
        images = batch["image"]
        height, width = images.shape[-2:]
        chance, area, aspect, top, left = draws.unbind(1)
        flat, tall = (math.log(bound) for bound in self.aspect)
        side = (area * (self.area[1] - self.area[0]) + self.area[0]).mul_(height * width).sqrt_()
        stretch = (aspect * ((tall - flat) / 2) + flat / 2).exp_()
        rows = _covered(height, side * stretch, top) & (chance < self.chance).unsqueeze(1)
        columns = _covered(width, side / stretch, left)
        # Multiplying by zeros and ones is many times faster than filling or choosing under a mask.
        hidden = rows.to(images.dtype).unsqueeze(2) * columns.to(images.dtype).unsqueeze(1)
        hidden = hidden.view(len(images), *[1] * (images.ndim - 3), height, width)
        erased = images * (1 - hidden)
        return {**batch, "image": erased + hidden * self._paint(images) if self.value else erased}

    def _paint(self, images: Tensor) -> float:
        return self.value if images.is_floating_point() else min(255, max(0, round(self.value)))


def _covered(length: int, extents: Tensor, places: Tensor) -> Tensor:
    """Which of `length` positions stretches of such extents cover, at places in [0, 1): [N, length]."""
    extents = extents.round().clamp_(1, length)
    starts = (places * (length - extents + 1)).floor_().unsqueeze(1)
    positions = torch.arange(length, device=extents.device)
    return (positions >= starts) & (positions < starts + extents.unsqueeze(1))


@dataclass(frozen=True)
class Normalize:
    """Turn pixels of 0 to 255 into float32: (pixel / 255 − mean) / std, by channel."""

    mean: Sequence[float]
    std: Sequence[float]
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = True
    keeps_counts: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The batch with its images normalised."""
        images = batch["image"]
        channels = images.shape[_channel_axis(images)]
        if len(self.mean) not in (1, channels):
            raise DataError(
                f"normalize has {len(self.mean)} means but the images have {channels} channels: "
                "give one mean and one std for each channel"
            )
        factors = _by_channel([1 / (255 * std) for std in self.std], images)
        offsets = _by_channel([-mean / std for mean, std in zip(self.mean, self.std, strict=True)], images)
        return {**batch, "image": _floats(images).mul_(factors).add_(offsets)}


def _floats(images: Tensor) -> Tensor:
    """The images as float32, copied."""
    is_plain = images.device.type == "cpu" and type(images) is Tensor
    if is_plain and images.numel() >= _LARGE:  # fresh memory would take longer than the arithmetic
        return torch.from_numpy(recycled(tuple(images.shape), np.float32)).copy_(images)
    return images.to(torch.float32, copy=True)


def _by_channel(values: list[float], images: Tensor) -> Tensor | float:
    # Made anew for each batch, which costs little: kept tensors would tie the transform to a device or a mode.
    if len(values) == 1:
        return values[0]
    behind = images.ndim - 1 - _channel_axis(images)
    return torch.tensor(values, dtype=torch.float32, device=images.device).view(-1, *[1] * behind)


def _channel_axis(images: Tensor) -> int:
    """Behind the samples, or behind the views of each if there are several."""
    return 1 if images.ndim < 6 else 2
