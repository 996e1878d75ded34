"""Transforms that only run on whole batches, on the training device: erase, normalize, multi-scale.

Images are [N, C, H, W], clips [N, C, T, H, W], of uint8 or float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from paceline.core.arguments import Count, Positive, PositiveShare, SameLength, Share
from paceline.core.buffer_pool import recycled
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import PositiveRange, ShareRange, Size
from paceline.data.transforms.annotations import move_batch_annotations
from paceline.data.transforms.functional import channel_axis, height_and_width

_LARGE = 1 << 18  # pixels of a batch whose memory is worth using again


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
    # Made for each batch, which costs little: kept tensors would tie the transform to a device or a mode.
    if len(values) == 1:
        return values[0]
    behind = images.ndim - 1 - channel_axis(images)
    return torch.tensor(values, dtype=torch.float32, device=images.device).view(-1, *[1] * behind)


@register.transform("multi_scale")
@dataclass(frozen=True)
class MultiScale:
    """Resize to one of `sizes`, each as likely: the same for all that a step computes, in every process.

    Images are interpolated and averaged where they shrink; masks keep their values; boxes and keypoints follow.
    """

    sizes: Annotated[Sequence[Size], Field(min_length=1)]
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = True
    per_step: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The batch at the size that `draws` [1, 1], on the host, says."""
        size = height_and_width(self.sizes[int(float(draws[0, 0]) * len(self.sizes))])
        images = batch["image"]
        height, width = images.shape[-2:]
        if size == (height, width):
            return batch
        result = {**batch, "image": _resize(images, size)}
        if "mask" in batch:
            result["mask"] = _resize_masks(batch["mask"], size)
        scales = torch.tensor([[size[1] / width, size[0] / height]], device=images.device)
        return result | move_batch_annotations(
            batch, scales, torch.zeros_like(scales), size, lambda masks, _: _resize_masks(masks, size)
        )


def _resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    planes = images.flatten(1, -3) if images.ndim == 5 else images
    # Only CPUs have a kernel for uint8, several times as fast as that for floats; it misreads planes that are one pixel
    # wide.
    has_kernel = images.device.type == "cpu" and 1 not in (*images.shape[-2:], *size)
    is_converted = not images.is_floating_point() and not has_kernel
    # Averaging costs nothing: the kernels of torch are as fast with as without it.
    resized = F.interpolate(planes.float() if is_converted else planes, size, mode="bilinear", antialias=True)
    if is_converted:
        resized = resized.round_().clamp_(0, 255).to(images.dtype)
    return resized.view(*images.shape[:-2], *size)


def _resize_masks(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks [N, H, W] at that size, by the nearest pixel."""
    if not len(masks):
        return masks.new_empty(0, *size)
    # "nearest" would take a pixel's corner for its center, and so move everything by half a pixel.
    return F.interpolate(masks.unsqueeze(1), size, mode="nearest-exact").squeeze(1)


@register.transform("random_masking")
@dataclass(frozen=True)
class RandomMasking:
    """Mask a share of the patches of each image, at random: adds "patch_mask", bool [N, num_patches].

    Every image has as many masked patches; "visible_patches", int64 [N, V], are the others in rising order. Which ones
    they are depends on the seed, the epoch and the sample alone.
    """

    num_patches: Count
    mask_ratio: PositiveShare = 0.75
    is_batch: ClassVar[bool] = True

    @property
    def draws(self) -> int:
        """One for each patch."""
        return self.num_patches

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The batch with its masks; the patches with the largest draws are masked."""
        num_visible = int(self.num_patches * (1 - self.mask_ratio))
        visible = draws.argsort(dim=1, stable=True)[:, :num_visible].sort(1).values
        masks = torch.ones(len(draws), self.num_patches, dtype=torch.bool, device=draws.device)
        return {**batch, "patch_mask": masks.scatter(1, visible, False), "visible_patches": visible}
