"""Per-pixel losses: batch["mask"] [N, H, W] against logits of the same size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.arguments import NonNegative, PartialShare, PositiveShare, Share
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.text import pluralize
from paceline.data.batch import Batch
from paceline.losses.class_weights import ClassNumbers, full_precision
from paceline.losses.loss_term import LossTerm


@register.loss("pixel_cross_entropy")
class PixelCrossEntropy:
    """Softmax cross-entropy of each pixel: the mean over the pixels whose mask is not `ignore_index`.

    With class weights it is the weighted mean, as torch has it: divided by the weights of the pixels' classes.
    """

    def __init__(
        self,
        num_classes: int,
        ignore_index: int | None = 255,
        class_weights: Sequence[NonNegative] | None = None,
        label_smoothing: PartialShare = 0.0,
    ) -> None:
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.weights = None if class_weights is None else ClassNumbers("class_weights", class_weights)

    def count(self, batch: Batch) -> float:
        """The labeled share of each image, or the mean weight of its pixels, summed over images."""
        check_ids("pixel_cross_entropy", batch, self.num_classes, self.ignore_index)
        masks = masks_of("pixel_cross_entropy", batch)
        if self.weights is not None:
            return self.weights.weighted(counts_of_classes(masks, self.num_classes, self.ignore_index)) / _area(masks)
        counting = labeled(masks, self.ignore_index)
        return float(len(masks)) if counting is None else int(counting.sum()) / _area(masks)

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        """The loss, summed over pixels, and what to divide it by, both per pixel of an image."""
        masks = masks_of("pixel_cross_entropy", batch)
        logits = class_logits("pixel_cross_entropy", outputs, masks, self.num_classes)
        weights = None if self.weights is None else self.weights.beside(logits)
        losses = _cross_entropies(
            "pixel_cross_entropy", logits, masks, self.ignore_index, weights, self.label_smoothing
        )
        weighing = pixel_weights(weights, masks, labeled(masks, self.ignore_index))
        whole = float(len(masks)) if weighing is None else weighing.sum() / _area(masks)
        return LossTerm(losses.sum() / _area(masks), whole)


@register.loss("ohem_cross_entropy")
class OhemCrossEntropy:
    """Softmax cross-entropy of the hard pixels only: the mean over them, with class weights the weighted mean.

    Hard are the pixels whose own class has a probability below `threshold`, and in any case the hardest
    `least_share` of an image's labeled pixels (with all that are as hard as the last of them). They are chosen
    within each image, and never among those of a micro-batch, so that no cut of a step changes the choice.
    The mean is over the hard pixels of the whole step; with `per_image` over those of an image, then over images.
    """

    def __init__(
        self,
        num_classes: int,
        ignore_index: int | None = 255,
        class_weights: Sequence[NonNegative] | None = None,
        threshold: PositiveShare = 0.7,
        least_share: Share = 0.1,
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

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        """The loss, summed over hard pixels, and their number; or the means of images and the number of images."""
        masks = masks_of("ohem_cross_entropy", batch)
        logits = class_logits("ohem_cross_entropy", outputs, masks, self.num_classes)
        losses = _cross_entropies("ohem_cross_entropy", logits, masks, self.ignore_index)
        hard = self._hard(losses.detach(), labeled(masks, self.ignore_index))
        weights = pixel_weights(None if self.weights is None else self.weights.beside(logits), masks, hard)
        assert weights is not None
        chosen = losses.masked_fill(~hard, 0) * weights
        if not self.per_image:
            return LossTerm(chosen.sum(), weights.sum())
        sums, wholes = chosen.flatten(1).sum(1), weights.flatten(1).sum(1)
        return LossTerm((sums / wholes.where(wholes != 0, 1)).sum(), float(len(masks)))

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


@register.loss("pixel_bce")
class PixelBinaryCrossEntropy:
    """Sigmoid cross-entropy of each pixel with its gray value / 255: the mean over all pixels.

    Outputs are logits [N, 1, H, W] or [N, H, W].
    """

    def count(self, batch: Batch) -> float:
        """The number of images."""
        return float(len(masks_of("pixel_bce", batch)))

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        """The mean over pixels, summed over images, and the number of images."""
        masks = masks_of("pixel_bce", batch)
        logits, targets = binary_pair("pixel_bce", outputs, masks)
        total = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        return LossTerm(total / _area(masks), float(len(masks)))


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


def masks_of(loss: str, batch: Batch) -> Tensor:
    """The masks of a batch, [N, H, W]."""
    if "mask" not in batch:
        raise DataError(f"{loss} compares outputs with masks, and these samples have none; use data with masks")
    masks: Tensor = batch["mask"]
    return masks


def class_logits(loss: str, outputs: Tensor, masks: Tensor, num_classes: int) -> Tensor:
    """The outputs in full precision, [N, C, H, W], if they fit the masks and the classes."""
    if outputs.ndim != 4 or outputs.shape[1] != num_classes:
        raise DataError(
            f"{loss}: outputs of shape {list(outputs.shape)} do not fit data of {pluralize(num_classes, 'class')}; "
            f"expected [N, {num_classes}, H, W]"
        )
    _check_size(loss, outputs, masks)
    return full_precision(outputs)


def binary_pair(loss: str, outputs: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and targets from 0 to 1, both [N, H, W], of outputs [N, 1, H, W] or [N, H, W] and gray masks."""
    logits = outputs.squeeze(1) if outputs.ndim == 4 and outputs.shape[1] == 1 else outputs
    if logits.ndim != 3:
        raise DataError(
            f"{loss}: outputs of shape {list(outputs.shape)} are not one number for each pixel; "
            "expected [N, 1, H, W], and masks that are gray, from 0 to 255"
        )
    _check_size(loss, logits, masks)
    logits = full_precision(logits)
    return logits, masks.to(logits.dtype) / 255


def labeled(masks: Tensor, ignore_index: int | None) -> Tensor | None:
    """Which pixels count, bool [N, H, W]; None for all."""
    return None if ignore_index is None else masks != ignore_index


def check_ids(loss: str, batch: Batch, num_classes: int, ignore_index: int | None) -> None:
    """Raise DataError if a mask holds an id that is none of a class; reads the masks, so for those on the host."""
    masks = masks_of(loss, batch)
    counting = labeled(masks, ignore_index)
    known = masks if counting is None else masks.masked_fill(~counting, 0)
    if known.numel() == 0 or int(known.max()) < num_classes:
        return
    worst = known.flatten(1).amax(1)
    sample = batch.ids[int((worst >= num_classes).nonzero()[0])]
    raise DataError(
        f"{loss}: the mask of sample {int(sample)} holds the id {int(known.max())}; "
        + expected_ids(num_classes, ignore_index)
    )


def expected_ids(num_classes: int, ignore_index: int | None) -> str:
    """What a mask may hold, and what to do about anything else."""
    if num_classes == 1:
        return "expected ids of classes, and there is only one; for masks that are gray use pixel_bce"
    ignored = "set ignore_index to leave pixels out" if ignore_index is None else f"or {ignore_index}, ignore_index"
    return f"expected 0 to {num_classes - 1}, {ignored}; a transform's mask_fill is an id too"


def pixel_weights(weights: Tensor | None, masks: Tensor, counting: Tensor | None) -> Tensor | None:
    """What each pixel weighs, [N, H, W]: as its class does, and 0 where it does not count; None if all weigh 1."""
    if weights is None:
        return None if counting is None else counting.float()
    own = weights[masks.long().clamp(max=len(weights) - 1)]
    return own if counting is None else own * counting


def counts_of_classes(masks: Tensor, num_classes: int, ignore_index: int | None) -> Tensor:
    """How many pixels of each class there are, int64 [C], those that are ignored left out."""
    counts = torch.bincount(masks.flatten(), minlength=num_classes)[:num_classes]
    if ignore_index is not None and ignore_index < num_classes:
        counts[ignore_index] = 0
    return counts


def _check_size(loss: str, outputs: Tensor, masks: Tensor) -> None:
    if outputs.shape[0] == masks.shape[0] and outputs.shape[-2:] == masks.shape[-2:]:
        return
    raise DataError(
        f"{loss}: {_described(outputs, 'output')} do not fit {_described(masks, 'mask')}; losses compare pixel with "
        "pixel, so the task has to resize outputs to the masks first"
    )


def _described(planes: Tensor, noun: str) -> str:
    return f"{pluralize(len(planes), noun)} of {planes.shape[-1]}×{planes.shape[-2]} pixels"
