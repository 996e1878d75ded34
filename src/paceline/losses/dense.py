"""Losses of each pixel by itself: batch["mask"] [N, H, W] against logits of the same size.

Where a denominator is known before the forward pass it counts images, or the labelled share of images, and not pixels:
a mean over pixels all the same, but one that holds when a step resizes its images after they were counted. Where images
differ in size between batches, as an evaluation may have them, each image weighs the same, not each pixel.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.batch import Batch
from paceline.losses.class_numbers import ClassNumbers
from paceline.losses.dense_inputs import (
    binary_pair,
    check_ids,
    class_logits,
    counts_of_classes,
    expected_ids,
    labelled,
    masks_of,
    pixel_weights,
)
from paceline.losses.term import Term


class PixelCrossEntropy:
    """Softmax cross-entropy of each pixel: the mean over the pixels whose mask is not `ignore_index`.

    With class weights it is the weighted mean, as torch has it: divided by the weights of the pixels' classes.
    """

    def __init__(
        self,
        num_classes: int,
        ignore_index: int | None = 255,
        class_weights: list[float] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.weights = None if class_weights is None else ClassNumbers("class_weights", class_weights)

    def count(self, batch: Batch) -> float:
        """The labelled share of each image, or the mean weight of its pixels, summed over images."""
        check_ids("pixel_cross_entropy", batch, self.num_classes, self.ignore_index)
        masks = masks_of("pixel_cross_entropy", batch)
        if self.weights is not None:
            return self.weights.weighted(counts_of_classes(masks, self.num_classes, self.ignore_index)) / _area(masks)
        counting = labelled(masks, self.ignore_index)
        return float(len(masks)) if counting is None else int(counting.sum()) / _area(masks)

    def __call__(self, outputs: Tensor, batch: Batch) -> Term:
        """The loss, summed over pixels, and what to divide it by, both per pixel of an image."""
        masks = masks_of("pixel_cross_entropy", batch)
        logits = class_logits("pixel_cross_entropy", outputs, masks, self.num_classes)
        weights = None if self.weights is None else self.weights.beside(logits)
        losses = _cross_entropies(
            "pixel_cross_entropy", logits, masks, self.ignore_index, weights, self.label_smoothing
        )
        weighing = pixel_weights(weights, masks, labelled(masks, self.ignore_index))
        whole = float(len(masks)) if weighing is None else weighing.sum() / _area(masks)
        return Term(losses.sum() / _area(masks), whole)


class OhemCrossEntropy:
    """Softmax cross-entropy of the hard pixels only: the mean over them, with class weights the weighted mean.

    Hard are the pixels whose own class has a probability below `threshold`, and in any case the hardest
    `least_share` of an image's labelled pixels (with all that are as hard as the last of them). They are chosen
    within each image, and never among those of a micro-batch, so that no cut of an update changes the choice.
    The mean is over the hard pixels of the whole update; with `per_image` over those of an image, then over images.
    """

    def __init__(
        self,
        num_classes: int,
        ignore_index: int | None = 255,
        class_weights: list[float] | None = None,
        threshold: float = 0.7,
        least_share: float = 0.1,
        per_image: bool = False,
    ) -> None:
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.least_loss = -math.log(threshold)
        self.least_share = least_share
        self.per_image = per_image
        self.weights = None if class_weights is None else ClassNumbers("class_weights", class_weights)

    def count(self, batch: Batch) -> float | None:
        """The number of images if each has its own mean; else only the outputs tell how many pixels are hard."""
        check_ids("ohem_cross_entropy", batch, self.num_classes, self.ignore_index)
        return float(len(masks_of("ohem_cross_entropy", batch))) if self.per_image else None

    def __call__(self, outputs: Tensor, batch: Batch) -> Term:
        """The loss, summed over hard pixels, and their number; or the means of images and the number of images."""
        masks = masks_of("ohem_cross_entropy", batch)
        logits = class_logits("ohem_cross_entropy", outputs, masks, self.num_classes)
        losses = _cross_entropies("ohem_cross_entropy", logits, masks, self.ignore_index)
        hard = self._hard(losses.detach(), labelled(masks, self.ignore_index))
        weights = pixel_weights(None if self.weights is None else self.weights.beside(logits), masks, hard)
        assert weights is not None
        chosen = losses.masked_fill(~hard, 0) * weights
        if not self.per_image:
            return Term(chosen.sum(), weights.sum())
        sums, wholes = chosen.flatten(1).sum(1), weights.flatten(1).sum(1)
        return Term((sums / wholes.where(wholes != 0, 1)).sum(), float(len(masks)))

    def _hard(self, losses: Tensor, counting: Tensor | None) -> Tensor:
        """Which pixels are hard, bool [N, H, W]. A loss that is not a number is, so that it does not go unnoticed."""
        counting = torch.ones_like(losses, dtype=torch.bool) if counting is None else counting
        ranked = losses.masked_fill(~counting, -1).flatten(1)  # ignored ones come last
        hard = ~(ranked <= self.least_loss)
        most = math.ceil(self.least_share * ranked.shape[1])
        if most > 0:
            wanted = (counting.flatten(1).sum(1, keepdim=True).double() * self.least_share).ceil().long()
            hardest = ranked.topk(most, dim=1).values
            hard |= ~(ranked < hardest.gather(1, (wanted - 1).clamp(min=0)))
        return hard.view_as(counting) & counting


class PixelBinaryCrossEntropy:
    """Sigmoid cross-entropy of each pixel with its grey value / 255: the mean over all pixels.

    Outputs are logits [N, 1, H, W] or [N, H, W].
    """

    def count(self, batch: Batch) -> float:
        """The number of images."""
        return float(len(masks_of("pixel_bce", batch)))

    def __call__(self, outputs: Tensor, batch: Batch) -> Term:
        """The mean over pixels, summed over images, and the number of images."""
        masks = masks_of("pixel_bce", batch)
        logits, targets = binary_pair("pixel_bce", outputs, masks)
        total = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        return Term(total / _area(masks), float(len(masks)))


def _area(masks: Tensor) -> int:
    return masks.shape[-2] * masks.shape[-1]


def _cross_entropies(
    loss: str,
    logits: Tensor,
    masks: Tensor,
    ignore_index: int | None,
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of each pixel, [N, H, W], 0 where it is ignored."""
    ignored = -100 if ignore_index is None else ignore_index  # a mask holds no negative id
    try:
        # Summed by the caller: graphics cards have no reproducible way to sum within this function.
        return F.cross_entropy(
            logits,
            masks.long(),
            weight=weights,
            ignore_index=ignored,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    except IndexError as error:
        expected = expected_ids(logits.shape[1], ignore_index)
        raise DataError(f"{loss}: a mask holds an id that is none of a class ({error}); {expected}") from error
