"""Transforms of whole batches of images of one size, on the training device; all are deterministic.

Images are [N, C, H, W], clips [N, C, T, H, W], of whole pixels or of float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from paceline.core.arguments import Positive, SameLength, Share
from paceline.core.buffer_pool import recycled
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import PositiveRange, ShareRange
from paceline.data.transforms.batch_objects import channel_axis

_LARGE = 1 << 18  # numbers of a batch whose memory is worth using again


@register.transform("random_erasing")
@dataclass(frozen=True)
class RandomErasing:
    """Erase a random rectangle with probability `p`, in all channels and frames; masks and objects stay as they are.

    `scale` is the range of the rectangle's area as a share of the image, `ratio` that of height / width, uniform in its
    logarithm, and `value` is in the units that the images have at this point.
    """

    p: Share = 0.5
    scale: ShareRange = (0.02, 0.33)
    ratio: PositiveRange = (0.3, 3.3)
    value: float = 0
    draws: ClassVar[int] = 5
    is_batch: ClassVar[bool] = True
    keeps_counts: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The batch, some of its images with a rectangle of `value`."""
        images = batch["image"]
        height, width = images.shape[-2:]
        drawn, area, ratio, top, left = draws.unbind(1)
        flat, tall = (math.log(bound) for bound in self.ratio)
        side = (area * (self.scale[1] - self.scale[0]) + self.scale[0]).mul_(height * width).sqrt_()
        stretch = (ratio * ((tall - flat) / 2) + flat / 2).exp_()
        rows = _covered(height, side * stretch, top) & (drawn < self.p).unsqueeze(1)
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


@register.transform("normalize", checks=[SameLength("mean", "std")])
@dataclass(frozen=True)
class Normalize:
    """Turn pixels of 0 to 255 into float32: (pixel / 255 − mean) / std, by channel; floats are not divided by 255."""

    mean: Annotated[Sequence[float], Field(min_length=1)]
    std: Annotated[Sequence[Positive], Field(min_length=1)]
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = True
    keeps_counts: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The batch with its images normalized."""
        images = batch["image"]
        channels = images.shape[channel_axis(images)]
        if len(self.mean) not in (1, channels):
            raise DataError(
                f"normalize has {len(self.mean)} means but the images have {channels} channels: "
                "give one mean and one std for each channel"
            )
        largest = 1 if images.is_floating_point() else 255
        factors = _by_channel([1 / (largest * std) for std in self.std], images)
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
    behind = images.ndim - 1 - channel_axis(images)
    return torch.tensor(values, dtype=torch.float32, device=images.device).view(-1, *[1] * behind)
