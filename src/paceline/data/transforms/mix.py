"""Batch transforms that mix each sample with another one: mixup, cutmix, or one of the two.

Partners are drawn within a micro-batch: the samples in a random order, each with the next. So every sample is a partner
once and never its own, unless it is alone. Labels become soft, float32 [N, num_classes], in proportion to what is seen
of each sample; multi-label ones too. Images keep their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from paceline.core.arguments import Share
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import RAGGED

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
        """The batch, blended."""
        order, share, drawn = draws.unbind(1)
        shares = torch.where(drawn < self.p, sample_beta(self.alpha, share), 1.0)
        _require_labels("mixup", batch)
        partners = _partners(order)
        labels = _mix_labels(batch["label"], partners, shares, self.num_classes)
        return {**batch, "image": _blend(batch["image"], partners, shares), "label": labels}


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
        """The batch, with rectangles pasted."""
        order, share, down, across, drawn = draws.unbind(1)
        shares = torch.where(drawn < self.p, sample_beta(self.alpha, share), 1.0)
        _require_labels("cutmix", batch)
        images, partners = batch["image"], _partners(order)
        visible, exact = _visible(images, shares, down, across)
        labels = _mix_labels(batch["label"], partners, exact, self.num_classes)
        return {**batch, "image": _paste(images, images, partners, visible), "label": labels}


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
        """The batch, each sample blended or pasted into."""
        order, share, down, across, drawn, choice = draws.unbind(1)
        is_cut, is_mixed = choice < self.cutmix_p, drawn < self.p
        blended = torch.where(is_mixed & ~is_cut, sample_beta(self.mixup_alpha, share), 1.0)
        cut = torch.where(is_mixed & is_cut, sample_beta(self.cutmix_alpha, share), 1.0)
        _require_labels("mixup_or_cutmix", batch)
        images, partners = batch["image"], _partners(order)
        visible, exact = _visible(images, cut, down, across)
        labels = _mix_labels(batch["label"], partners, blended * exact, self.num_classes)
        mixed = _paste(_blend(images, partners, blended), images, partners, visible)
        return {**batch, "image": mixed, "label": labels}


def sample_beta(alpha: float, draws: Tensor) -> Tensor:
    """Numbers distributed as Beta(alpha, alpha), from uniform ones [N]."""
    table = _beta_cdf(alpha)
    below = torch.from_numpy(table if draws.dtype == torch.float64 else table.astype(np.float32)).to(draws.device)
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


def _visible(images: Tensor, shares: Tensor, down: Tensor, across: Tensor) -> tuple[Tensor, Tensor]:
    """1 where a sample's own image is seen, 0 in its partner's rectangle [N, 1, (1,) H, W]; and the share of ones."""
    height, width = images.shape[-2:]
    sides = (1 - shares).sqrt()
    rows, columns = _covered(height, sides, down), _covered(width, sides, across)
    exact = 1 - rows.sum(1) * columns.sum(1) / (height * width)
    visible = 1 - rows.to(images.dtype).unsqueeze(2) * columns.to(images.dtype).unsqueeze(1)
    return visible.view(len(images), *[1] * (images.ndim - 3), height, width), exact


def _covered(length: int, sides: Tensor, centers: Tensor) -> Tensor:
    """Which of `length` positions lie within a part `sides` [N] of it, around centers in [0, 1): [N, length]."""
    extents, centers = (length * sides).floor_(), (length * centers).floor_()
    starts = (centers - (extents / 2).floor_()).unsqueeze(1)
    positions = torch.arange(length, device=sides.device)
    return (positions >= starts) & (positions < starts + extents.unsqueeze(1))


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
