"""Transforms of whole batches of images of one size, on the training device; all are deterministic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import DataError


@dataclass(frozen=True)
class Flip:
    """Mirror left and right with the given chance."""

    chance: float = 0.5
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = True

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """The images, some of them mirrored."""
        count = len(images)
        # Copying whole images out of both versions is several times faster than choosing pixel by pixel.
        chosen = torch.arange(count, device=images.device).add_(draws[:, 0] < self.chance, alpha=count)
        return torch.cat([images, images.flip(-1)]).index_select(0, chosen)


@dataclass(frozen=True)
class RandomCrop:
    """Surround with `padding` zeros and cut the old size out again at a random place."""

    padding: int
    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = True

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """The images, each shifted by up to `padding` pixels either way."""
        count, channels, height, width = images.shape
        padded = F.pad(images, (self.padding,) * 4).contiguous()
        shifts = (draws * (2 * self.padding + 1)).long()
        # Each row of the result is `width` neighbours in memory: copying rows is faster than indexing pixels.
        stride, plane = padded.shape[3], padded.shape[2] * padded.shape[3]
        planes = torch.arange(0, padded.numel(), plane, device=images.device).view(count, channels)
        corners = planes + (shifts[:, :1] * stride + shifts[:, 1:])
        rows = corners.unsqueeze(-1) + torch.arange(0, height * stride, stride, device=images.device)
        windows = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
        return windows.index_select(0, rows.view(-1)).view_as(images)


@dataclass(frozen=True)
class RandomErasing:
    """Paint over a random rectangle of some images, in all channels.

    `area` is the share of the image that is hidden, `aspect` is height / width, uniform in its logarithm, and
    `value` is in the units that the images have at this point.
    """

    chance: float
    area: Sequence[float] = (0.02, 0.33)
    aspect: Sequence[float] = (0.3, 3.3)
    value: float = 0
    draws: ClassVar[int] = 5
    is_batch: ClassVar[bool] = True

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """The images, some of them with a rectangle of `value`."""
        height, width = images.shape[2:]
        chance, area, aspect, top, left = draws.unbind(1)
        flat, tall = (math.log(bound) for bound in self.aspect)
        side = (area * (self.area[1] - self.area[0]) + self.area[0]).mul_(height * width).sqrt_()
        stretch = (aspect * ((tall - flat) / 2) + flat / 2).exp_()
        rows = _covered(height, side * stretch, top) & (chance < self.chance).unsqueeze(1)
        columns = _covered(width, side / stretch, left)
        # Multiplying by zeros and ones is many times faster than filling or choosing under a mask.
        hidden = (rows.to(images.dtype).unsqueeze(2) * columns.to(images.dtype).unsqueeze(1)).unsqueeze(1)
        erased = images * (1 - hidden)
        return erased + hidden * self._paint(images) if self.value else erased

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

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """The images, normalised."""
        if len(self.mean) not in (1, images.shape[1]):
            raise DataError(
                f"normalize has {len(self.mean)} means but the images have {images.shape[1]} channels: "
                "give one mean and one std for each channel"
            )
        scale = _by_channel([1 / (255 * std) for std in self.std], images.device)
        shift = _by_channel([-mean / std for mean, std in zip(self.mean, self.std, strict=True)], images.device)
        return images.to(torch.float32, copy=True).mul_(scale).add_(shift)


def _by_channel(values: list[float], device: torch.device) -> Tensor | float:
    # Made anew for each batch, which costs little: kept tensors would tie the transform to a device or a mode.
    if len(values) == 1:
        return values[0]
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)
