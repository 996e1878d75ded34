"""Losses of how regions overlap: ratios of sums over pixels, batch["mask"] [N, H, W] against logits of the same size.

With p the probabilities and g the truth. Data of one class have gray masks: p is the sigmoid of logits [N, 1, H, W] or
[N, H, W], and g the gray value / 255. Of several classes p is the softmax of logits [N, C, H, W], and g 1 for the
pixel's class and 0 for the others; pixels whose mask is `ignore_index` are left out.

Sums are over the whole step, however it is cut, and over classes, each by its weight. With `per_image` each image
and class has a ratio of its own; the loss is their weighted mean over the classes that the image's mask holds (0 where
it holds none), then the mean over images. 1e-6 for each image keeps a ratio of nothing with nothing at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.core.arguments import NonNegative
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.losses.class_weights import ClassNumbers
from paceline.losses.loss_term import LossTerm
from paceline.losses.pixel import binary_pair, check_ids, class_logits, labeled, masks_of

_LEAST = 1e-6

Parts = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Numerator and denominator [N, C] from probabilities and truth, both [N, C, H, W]."""


class OverlapLoss:
    """A ratio of sums over pixels, which `parts` tells apart."""

    def __init__(
        self,
        name: str,
        parts: Parts,
        num_classes: int,
        per_image: bool,
        ignore_index: int | None = None,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        self.name = name
        self.parts = parts
        self.num_classes = num_classes
        self.per_image = per_image
        self.ignore_index = ignore_index
        self.weights = None if class_weights is None else ClassNumbers("class_weights", class_weights)

    def count(self, batch: Batch) -> float | None:
        """The number of images if each has its own ratio; else the denominator contains predictions."""
        if self.num_classes > 1:
            check_ids(self.name, batch, self.num_classes, self.ignore_index)
        return float(len(masks_of(self.name, batch))) if self.per_image else None

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        """The sums of a micro-batch, or the ratios of its images and their number."""
        masks = masks_of(self.name, batch)
        probabilities, truth = self._one(outputs, masks) if self.num_classes == 1 else self._several(outputs, masks)
        weights = probabilities.new_ones(()) if self.weights is None else self.weights.beside(probabilities)
        wrong, whole = self.parts(probabilities, truth)
        if not self.per_image:
            return LossTerm((wrong * weights).sum(), (whole * weights).sum() + _LEAST * len(masks))
        weights = weights.expand_as(wrong)
        if self.num_classes > 1:
            weights = weights * (_over_pixels(truth) > 0)
        totals = weights.sum(1)
        ratios = (wrong / (whole + _LEAST) * weights).sum(1) / totals.where(totals != 0, 1)
        return LossTerm(ratios.sum(), float(len(masks)))

    def _one(self, outputs: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        logits, targets = binary_pair(self.name, outputs, masks)
        return logits.sigmoid().unsqueeze(1), targets.unsqueeze(1)

    def _several(self, outputs: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = class_logits(self.name, outputs, masks, self.num_classes).softmax(1)
        classes = torch.arange(self.num_classes, device=masks.device).view(-1, 1, 1)
        truth = (masks.unsqueeze(1) == classes).to(probabilities.dtype)
        counting = labeled(masks, self.ignore_index)
        if counting is None:
            return probabilities, truth
        return probabilities * counting.unsqueeze(1), truth * counting.unsqueeze(1)


@register.loss("dice_loss")
def dice_loss(
    num_classes: int,
    per_image: bool = False,
    ignore_index: int | None = 255,
    class_weights: Sequence[NonNegative] | None = None,
) -> OverlapLoss:
    """Soft Dice with squares: Σ(p − g)² / Σ(p² + g²), one minus 2Σpg / Σ(p² + g²).

    Without squares the sums over all classes would be as large for every prediction, and the ratio no more than the
    mean error; and a gray truth could not be met. `cel` is the form without squares, for one class.
    """
    return OverlapLoss("dice_loss", _dice, num_classes, per_image, ignore_index, class_weights)


@register.loss("iou_loss")
def iou_loss(
    num_classes: int,
    per_image: bool = False,
    ignore_index: int | None = 255,
    class_weights: Sequence[NonNegative] | None = None,
) -> OverlapLoss:
    """Soft intersection over union: one minus Σpg / Σ(p + g − pg)."""
    return OverlapLoss("iou_loss", _iou, num_classes, per_image, ignore_index, class_weights)


@register.loss("cel")
def consistency_enhanced_loss(per_image: bool = False) -> OverlapLoss:
    """What saliency models add to cross-entropy so that objects come out whole: Σ(p + g − 2pg) / Σ(p + g)."""
    return OverlapLoss("cel", _cel, 1, per_image)


def _dice(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return _over_pixels((p - g).square()), _over_pixels(p.square()) + _over_pixels(g.square())


def _iou(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    wrong, total = _cel(p, g)
    return wrong, (total + wrong) / 2  # p + g − pg is the middle of p + g and p + g − 2pg


def _cel(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return _over_pixels(torch.addcmul(g, p, 1 - 2 * g)), _over_pixels(p) + _over_pixels(g)


def _over_pixels(planes: Tensor) -> Tensor:
    return planes.flatten(2).sum(2)
