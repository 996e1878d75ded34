"""Transforms of whole batches, on the training device: erase, normalize, multi-scale, mask, mixup, cutmix.

Images are [N, C, H, W], clips [N, C, T, H, W], of uint8 or float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from paceline.core.arguments import Count, Positive, PositiveShare, SameLength, Share
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.world import constant
from paceline.data.argument_types import PositiveRange, ShareRange, Size
from paceline.data.batch import IMAGE_SIZE, RAGGED
from paceline.data.transforms.functional import channel_axis, height_and_width


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
    keeps_padding: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        images = batch["image"]
        height, width = images.shape[-2:]
        own_height, own_width = height, width
        if IMAGE_SIZE in batch:
            own_height, own_width = batch[IMAGE_SIZE].to(images.device, non_blocking=True).unbind(1)
        drawn, area, ratio, top, left = draws.unbind(1)
        flat, tall = (math.log(bound) for bound in self.ratio)
        side = (area * (self.scale[1] - self.scale[0]) + self.scale[0]).mul_(own_height * own_width).sqrt_()
        stretch = (ratio * ((tall - flat) / 2) + flat / 2).exp_()
        rows = _stretch(height, side * stretch, top, own_height) & (drawn < self.p).unsqueeze(1)
        hidden = _rectangles(images, rows, _stretch(width, side / stretch, left, own_width))
        erased = images * (1 - hidden)
        return {**batch, "image": erased + hidden * self._paint(images) if self.value else erased}

    def _paint(self, images: Tensor) -> float:
        return self.value if images.is_floating_point() else min(255, max(0, round(self.value)))


def _stretch(length: int, extents: Tensor, places: Tensor, own: int | Tensor) -> Tensor:
    """Which of `length` positions stretches of such extents cover, at places in [0, 1): [N, length].

    They lie within the first `own` positions, of each image or of all.
    """
    extents = extents.round().clamp_(min=1)
    extents = torch.minimum(extents, own) if isinstance(own, Tensor) else extents.clamp_(max=own)
    return _covered(length, (places * (own - extents + 1)).floor_(), extents)


def _covered(length: int, starts: Tensor, extents: Tensor) -> Tensor:
    """Which of `length` positions stretches [N] cover: [N, length]."""
    positions, starts = torch.arange(length, device=extents.device), starts.unsqueeze(1)
    return (positions >= starts) & (positions < starts + extents.unsqueeze(1))


def _rectangles(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """1 in the rectangle of these rows [N, H] and columns [N, W], else 0, [N, 1, (1,) H, W].

    Multiplying by zeros and ones is many times faster than filling or choosing under a mask.
    """
    planes = rows.to(images.dtype).unsqueeze(2) * columns.to(images.dtype).unsqueeze(1)
    return planes.view(len(images), *[1] * (images.ndim - 3), *images.shape[-2:])


@register.transform("normalize", checks=[SameLength("mean", "std")])
@dataclass(frozen=True)
class Normalize:
    """Turn pixels of 0 to 255 into float32: (pixel / 255 − mean) / std, by channel; floats are not divided by 255."""

    mean: Annotated[Sequence[float], Field(min_length=1)]
    std: Annotated[Sequence[Positive], Field(min_length=1)]
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = True
    keeps_counts: ClassVar[bool] = True
    keeps_padding: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        images = batch["image"]
        factors = self._float_factors if images.is_floating_point() else self._pixel_factors
        scaled = _floats(images).mul_(self._by_channel(factors, images))
        return {**batch, "image": scaled.add_(self._by_channel(self._offsets, images))}

    @cached_property
    def _float_factors(self) -> list[float]:
        return [1 / std for std in self.std]

    @cached_property
    def _pixel_factors(self) -> list[float]:
        return [1 / (255 * std) for std in self.std]

    @cached_property
    def _offsets(self) -> list[float]:
        return [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]

    def _by_channel(self, values: list[float], images: Tensor) -> Tensor | float:
        if len(values) == 1:
            return values[0]
        axis = channel_axis(images)
        if len(values) != images.shape[axis]:
            raise DataError(
                f"normalize has {len(values)} means but the images have {images.shape[axis]} channels: "
                "give one mean and one std for each channel"
            )
        # Made for each batch, which costs little: kept tensors would tie the transform to a device or a mode.
        return constant(values, images.device, torch.float32).view(-1, *[1] * (images.ndim - 1 - axis))


def _floats(images: Tensor) -> Tensor:
    """The images as float32, copied."""
    return images.to(torch.float32, copy=True) if images.is_floating_point() else images.float()


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
        size = height_and_width(self.sizes[int(float(draws[0, 0]) * len(self.sizes))])
        images = batch["image"]
        height, width = images.shape[-2:]
        if size == (height, width):
            return batch
        result = {**batch, "image": _resize(images, size)}
        if "mask" in batch:
            result["mask"] = _resize_masks(batch["mask"], size)
        return result | _resize_objects(batch, size[1] / width, size[0] / height, size)


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


def _resize_objects(batch: Mapping[str, Any], across: float, down: float, size: tuple[int, int]) -> dict[str, Any]:
    """The "matrix" and the objects of a batch whose images are scaled to `size`."""
    device = batch["image"].device
    factors, bounds = constant([across, down], device), constant([size[1], size[0]], device)

    def resize_keypoints(keypoints: Tensor) -> Tensor:
        points = keypoints[..., :2] * factors
        is_inside = ((points >= 0) & (points < bounds)).all(2) & (keypoints[..., 2] > 0)
        return torch.cat([points, keypoints[..., 2:]], 2) * is_inside[..., None]

    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "boxes": lambda boxes: torch.minimum((boxes * factors.repeat(2)).clamp(min=0), bounds.repeat(2)),
        "masks": lambda masks: _resize_masks(masks, size),
        "keypoints": resize_keypoints,
        "area": lambda area: area * factors.prod(),
    }
    resized: dict[str, Any] = {
        name: [change(each) for each in batch[name]] for name, change in changes.items() if name in batch
    }
    if "matrix" in batch:
        linear = batch["matrix"][:, :, :2] / factors
        resized["matrix"] = torch.cat([linear, batch["matrix"][:, :, 2:]], 2)
    return resized


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
        # The patches with the largest draws are masked.
        num_visible = int(self.num_patches * (1 - self.mask_ratio))
        visible = draws.argsort(dim=1, stable=True)[:, :num_visible].sort(1).values
        masks = torch.ones(len(draws), self.num_patches, dtype=torch.bool, device=draws.device)
        return {**batch, "patch_mask": masks.scatter(1, visible, False), "visible_patches": visible}


# --- mixup and cutmix ---------------------------------------------------------------------------------------
#
# Partners are drawn within a micro-batch: the samples in a random order, each with the next. So every sample is a
# partner once and never its own, unless it is alone. Labels become soft, float32 [N, num_classes], in proportion to
# what is seen of each sample; multi-label ones too. Images keep their dtype.

Alpha = Annotated[float, Field(gt=0, le=100)]

_CELLS = 2048


@register.transform("mixup")
@dataclass(frozen=True)
class MixUp:
    """Blend each image with its partner's; the share of its own is drawn from Beta(alpha, alpha)."""

    alpha: Alpha = 1.0
    p: Share = 1.0
    _: KW_ONLY
    num_classes: int
    draws: ClassVar[int] = 3
    is_batch: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        order, share, drawn = draws.unbind(1)
        blended = torch.where(drawn < self.p, sample_beta(self.alpha, share), 1.0)
        return _mix("mixup", batch, order, self.num_classes, blended)


@register.transform("cutmix")
@dataclass(frozen=True)
class CutMix:
    """Paste a rectangle of the partner's image; the share of its own that stays is drawn from Beta(alpha, alpha).

    The rectangle has the image's aspect ratio and its center anywhere; the part of it that falls outside is lost.
    """

    alpha: Alpha = 1.0
    p: Share = 1.0
    _: KW_ONLY
    num_classes: int
    draws: ClassVar[int] = 5
    is_batch: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        order, share, down, across, drawn = draws.unbind(1)
        cut = torch.where(drawn < self.p, sample_beta(self.alpha, share), 1.0)
        return _mix("cutmix", batch, order, self.num_classes, None, (cut, down, across))


@register.transform("mixup_or_cutmix")
@dataclass(frozen=True)
class MixUpOrCutMix:
    """Apply cutmix to each sample with probability `cutmix_p`, else mixup."""

    mixup_alpha: Alpha = 0.8
    cutmix_alpha: Alpha = 1.0
    cutmix_p: Share = 0.5
    p: Share = 1.0
    _: KW_ONLY
    num_classes: int
    draws: ClassVar[int] = 6
    is_batch: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        order, share, down, across, drawn, choice = draws.unbind(1)
        is_cut, is_mixed = choice < self.cutmix_p, drawn < self.p
        blended = torch.where(is_mixed & ~is_cut, sample_beta(self.mixup_alpha, share), 1.0)
        cut = torch.where(is_mixed & is_cut, sample_beta(self.cutmix_alpha, share), 1.0)
        return _mix("mixup_or_cutmix", batch, order, self.num_classes, blended, (cut, down, across))


def _mix(
    name: str,
    batch: dict[str, Any],
    order: Tensor,
    num_classes: int,
    blended: Tensor | None,
    cut: tuple[Tensor, Tensor, Tensor] | None = None,
) -> dict[str, Any]:
    """The batch, mixed by the share of its own image that each sample keeps [N], and that of its rectangle's place."""
    _require_labels(name, batch)
    images, partners = batch["image"], _partners(order)
    mixed, shares = images, torch.ones_like(order)
    if blended is not None:
        mixed, shares = _blend(images, partners, blended), blended
    if cut is not None:
        hidden, seen = _cut(images, *cut)
        mixed, shares = _paste(mixed, images, partners, 1 - hidden), shares * seen
    return {**batch, "image": mixed, "label": _mix_labels(batch["label"], partners, shares, num_classes)}


def sample_beta(alpha: float, draws: Tensor) -> Tensor:
    """Numbers distributed as Beta(alpha, alpha), from uniform ones [N]."""
    table = _beta_cdf(alpha)
    on_host = torch.from_numpy(table if draws.dtype == torch.float64 else table.astype(np.float32))
    below = on_host.to(draws.device, non_blocking=True)
    half = torch.minimum(draws, 1 - draws)
    cells = torch.searchsorted(below, half, right=True).clamp_(1, _CELLS) - 1
    within = (half - below[cells]) / (below[cells + 1] - below[cells])
    small = ((cells + within) / _CELLS).pow(1 / min(alpha, 1.0)) / 2
    return torch.where(draws < 0.5, small, 1 - small)


@lru_cache
def _beta_cdf(alpha: float) -> NDArray[np.float64]:
    """The distribution function of Beta(alpha, alpha) at x from 0 to 1/2, in equal steps of s = (2x)^min(alpha, 1).

    In s the density is finite also where that in x is not, so that straight lines between the steps do.
    """
    s = np.linspace(0, 1, 16 * _CELLS + 1)
    x = s ** (1 / min(alpha, 1.0)) / 2
    density = x ** max(alpha - 1, 0.0) * (1 - x) ** (alpha - 1)
    total = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    found: NDArray[np.float64] = total[::16] / (2 * total[-1])
    return found


def _partners(order: Tensor) -> Tensor:
    """Each sample's partner: the samples stand in the order of their draws, in a circle."""
    queue = order.argsort(stable=True)
    return torch.empty_like(queue).index_copy_(0, queue, queue.roll(-1))


def _cut(images: Tensor, shares: Tensor, down: Tensor, across: Tensor) -> tuple[Tensor, Tensor]:
    """1 in the rectangle of each sample's partner, else 0, [N, 1, (1,) H, W]; and the exact share outside."""
    (height, width), sides = images.shape[-2:], (1 - shares).sqrt()
    rows, columns = _around(height, sides, down), _around(width, sides, across)
    return _rectangles(images, rows, columns), 1 - rows.sum(1) * columns.sum(1) / (height * width)


def _around(length: int, sides: Tensor, centers: Tensor) -> Tensor:
    """Which of `length` positions lie within a part `sides` [N] of it, around centers in [0, 1): [N, length]."""
    extents = (length * sides).floor_()
    return _covered(length, (length * centers).floor_() - (extents / 2).floor_(), extents)


def _blend(images: Tensor, partners: Tensor, shares: Tensor) -> Tensor:
    weights = shares.float().view(-1, *[1] * (images.ndim - 1))
    others = images.index_select(0, partners)
    if images.is_floating_point():
        return others.lerp_(images, weights)
    return others.float().lerp_(images.float(), weights).round_().to(images.dtype)


def _paste(images: Tensor, sources: Tensor, partners: Tensor, visible: Tensor) -> Tensor:
    others = sources.index_select(0, partners)
    if images.is_floating_point():
        return others.lerp_(images, visible)  # exact at weights of 0 and 1
    # Multiplying by zeros and ones is many times faster than choosing under a mask.
    return others.mul_(1 - visible).addcmul_(images, visible)


def _mix_labels(labels: Tensor, partners: Tensor, shares: Tensor, num_classes: int) -> Tensor:
    """Labels as float32 [N, num_classes], with a share [N] of the own and for the rest the partner's."""
    if labels.ndim == 1:
        soft = torch.zeros(len(labels), num_classes, device=labels.device).scatter_(1, labels.unsqueeze(1), 1.0)
    else:
        soft = labels.float()
    return soft.index_select(0, partners).lerp_(soft, shares.float().unsqueeze(1))


def _require_labels(name: str, batch: Mapping[str, Any]) -> None:
    if "label" not in batch:
        raise DataError(f"{name} mixes images with their labels, but the samples have none: leave it out")
    located = sorted((RAGGED | {"mask"}).intersection(batch))
    if located:
        raise DataError(f"{name} mixes images and labels, but the samples also have {', '.join(located)}: leave it out")
