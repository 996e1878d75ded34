"""Region losses (Dice, IoU, CEL): ratios of sums over pixels, logits against batch["mask"] [N, H, W] of the same size.

With p the probabilities and g the truth. Data of one class have gray masks: p is the sigmoid of logits [N, 1, H, W] or
[N, H, W], and g the gray value / 255. With several classes, p is the softmax of logits [N, C, H, W] and g one-hot;
pixels whose mask is `ignore_index` are left out.

Sums are over the global batch and over classes, weighted by class. With `per_image` each image and class has its own
ratio; the loss is their weighted mean over the classes in the image's mask (0 without any), then the mean over images.
1e-6 per image in the denominator makes 0 / 0 a 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.core.arguments import NonNegative
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.losses.class_weights import make_class_weights
from paceline.losses.loss_term import LossTerm
from paceline.losses.pixel import MaskTargets, binary_targets

_EPSILON = 1e-6

Ratio = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Numerator and denominator [N, C] from probabilities and truth, both [N, C, H, W]."""


class RegionLoss:
    """A ratio of sums over pixels."""

    def __init__(
        self,
        name: str,
        ratio: Ratio,
        num_classes: int,
        per_image: bool,
        ignore_index: int | None = None,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        self.ratio = ratio
        self.num_classes = num_classes
        self.per_image = per_image
        self.targets = MaskTargets(name, num_classes, ignore_index)
        self.weights = make_class_weights("class_weights", class_weights)

    def check(self, batch: Batch) -> tuple[int, str] | None:
        return self.targets.find_unknown_id(batch) if self.num_classes > 1 else None

    def count(self, batch: Batch) -> float | None:
        """The number of images if each has its own ratio; otherwise the denominator depends on outputs."""
        return float(len(self.targets.masks(batch))) if self.per_image else None

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        """The sums of a micro-batch, or the ratios of its images and their number."""
        masks = self.targets.masks(batch)
        p, g = self._binary(outputs, masks) if self.num_classes == 1 else self._multi_class(outputs, masks)
        if (is_inside := batch.is_inside()) is not None:
            p, g = p * is_inside.unsqueeze(1), g * is_inside.unsqueeze(1)
        weights = p.new_ones(()) if self.weights is None else self.weights.to(p)
        numerator, denominator = self.ratio(p, g)
        if not self.per_image:
            return LossTerm((numerator * weights).sum(), (denominator * weights).sum() + _EPSILON * len(masks))
        weights = weights.expand_as(numerator)
        if self.num_classes > 1:
            weights = weights * (_sum_pixels(g) > 0)
        totals = weights.sum(1)
        ratios = (numerator / (denominator + _EPSILON) * weights).sum(1) / totals.where(totals != 0, 1)
        return LossTerm(ratios.sum(), float(len(masks)))

    def _binary(self, outputs: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        logits, targets = binary_targets(self.targets.loss, outputs, masks)
        return logits.sigmoid().unsqueeze(1), targets.unsqueeze(1)

    def _multi_class(self, outputs: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        p = self.targets.logits(outputs, masks).softmax(1)
        class_ids = torch.arange(self.num_classes, device=masks.device).view(-1, 1, 1)
        g = (masks.unsqueeze(1) == class_ids).to(p.dtype)
        is_labeled = self.targets.is_labeled(masks)
        return (p, g) if is_labeled is None else (p * is_labeled.unsqueeze(1), g * is_labeled.unsqueeze(1))


@register.loss("dice_loss")
def dice_loss(
    num_classes: int,
    per_image: bool = False,
    ignore_index: int | None = 255,
    class_weights: Sequence[NonNegative] | None = None,
) -> RegionLoss:
    """Soft Dice with squares: Σ(p − g)² / Σ(p² + g²), which is 1 − 2Σpg / Σ(p² + g²).

    Without squares the denominator over all classes would be the same for every prediction, and no prediction would
    reach 0 for a gray mask. `cel` is the form without squares, for one class.
    """
    return RegionLoss("dice_loss", _dice, num_classes, per_image, ignore_index, class_weights)


@register.loss("iou_loss")
def iou_loss(
    num_classes: int,
    per_image: bool = False,
    ignore_index: int | None = 255,
    class_weights: Sequence[NonNegative] | None = None,
) -> RegionLoss:
    """Soft intersection over union: 1 − Σpg / Σ(p + g − pg)."""
    return RegionLoss("iou_loss", _iou, num_classes, per_image, ignore_index, class_weights)


@register.loss("cel")
def consistency_enhanced_loss(per_image: bool = False) -> RegionLoss:
    """The consistency-enhanced loss of MINet, beside cross-entropy in saliency: Σ(p + g − 2pg) / Σ(p + g)."""
    return RegionLoss("cel", _cel, 1, per_image)


def _dice(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return _sum_pixels((p - g).square()), _sum_pixels(p.square()) + _sum_pixels(g.square())


def _iou(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    difference, total = _cel(p, g)
    return difference, (total + difference) / 2  # p + g − pg is the mean of p + g and p + g − 2pg


def _cel(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return _sum_pixels(torch.addcmul(g, p, 1 - 2 * g)), _sum_pixels(p) + _sum_pixels(g)


def _sum_pixels(planes: Tensor) -> Tensor:
    return planes.flatten(2).sum(2)
