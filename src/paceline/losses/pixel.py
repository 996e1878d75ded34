"""Pixel losses: logits against batch["mask"] [N, H, W] of the same size."""

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
from paceline.core.world import to_float64
from paceline.data.batch import IMAGE_SIZE, Batch, crop_padding
from paceline.losses.class_weights import ClassWeights, make_class_weights, to_full_precision
from paceline.losses.loss_term import LossTerm

_PADDING = -100  # which is no id, in masks without one that is ignored


@register.loss("pixel_cross_entropy")
class PixelCrossEntropy:
    """Softmax cross-entropy of each pixel: the mean over the pixels whose mask is not `ignore_index`.

    With class weights it is torch's weighted mean, divided by the weights of the pixels' classes. Where images differ
    in size, a pixel counts by its share of its own image.
    """

    def __init__(
        self,
        num_classes: int,
        ignore_index: int | None = 255,
        class_weights: Sequence[NonNegative] | None = None,
        label_smoothing: PartialShare = 0.0,
    ) -> None:
        self.targets = MaskTargets("pixel_cross_entropy", num_classes, ignore_index)
        self.check = self.targets.find_unknown_id
        self.label_smoothing = label_smoothing
        self.weights = make_class_weights("class_weights", class_weights)

    def count(self, batch: Batch) -> Tensor | float:
        """The labeled fraction of each image, or the mean weight of its pixels, summed over images."""
        masks = self.targets.masks(batch)
        if IMAGE_SIZE in batch:
            each = [crop_padding(mask, batch, index) for index, mask in enumerate(masks[:, None])]
            return sum((self._count(mask) for mask in each[1:]), self._count(each[0]))
        return self._count(masks)

    def _count(self, masks: Tensor) -> Tensor | float:
        if self.weights is not None:
            return self.weights.sum_over_counts(self.targets.class_counts(masks)) / _area(masks)
        is_labeled = self.targets.is_labeled(masks)
        return float(len(masks)) if is_labeled is None else to_float64(is_labeled.sum()) / _area(masks)

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        """The loss summed over pixels, and its denominator, both divided by the pixels of an image."""
        masks = self.targets.masks(batch)
        logits = self.targets.logits(outputs, masks)
        weights = None if self.weights is None else self.weights.to(logits)
        losses = self.targets.cross_entropy(logits, masks, weights, self.label_smoothing)
        per_pixel = _pixel_weights(self.weights, logits, masks, self.targets.is_labeled(masks))
        denominator = float(len(masks)) if per_pixel is None else sum_shares(per_pixel, batch)
        return LossTerm(sum_shares(losses, batch), denominator)


@register.loss("ohem_cross_entropy")
class OhemCrossEntropy:
    """Softmax cross-entropy of the hard pixels only (OHEM): their mean, with class weights their weighted mean.

    A pixel is hard if the probability of its class is below `threshold`. At least the hardest `min_kept` of an image's
    labeled pixels are kept, a fraction, with all that are as hard as the last of them. Pixels are selected within each
    image, so the micro-batch size does not change the selection. The mean is over the hard pixels of the global batch;
    with `per_image`, over those of each image, then over images.
    """

    def __init__(
        self,
        num_classes: int,
        ignore_index: int | None = 255,
        class_weights: Sequence[NonNegative] | None = None,
        threshold: PositiveShare = 0.7,
        min_kept: Share = 0.1,
        per_image: bool = False,
    ) -> None:
        self.targets = MaskTargets("ohem_cross_entropy", num_classes, ignore_index)
        self.check = self.targets.find_unknown_id
        self.loss_threshold = -math.log(threshold)
        self.min_kept = min_kept
        self.per_image = per_image
        self.weights = make_class_weights("class_weights", class_weights)

    def count(self, batch: Batch) -> float | None:
        """The number of images if each has its own mean; otherwise the number of hard pixels depends on outputs."""
        return float(len(self.targets.masks(batch))) if self.per_image else None

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        """The loss summed over hard pixels and their number; or the means of images and the number of images."""
        masks = self.targets.masks(batch)
        logits = self.targets.logits(outputs, masks)
        losses = self.targets.cross_entropy(logits, masks)
        is_hard = self._is_hard(losses.detach(), self.targets.is_labeled(masks))
        weights = _pixel_weights(self.weights, logits, masks, is_hard)
        assert weights is not None
        kept = losses.masked_fill(~is_hard, 0) * weights
        if not self.per_image:
            return LossTerm(kept.sum(), weights.sum())
        sums, totals = kept.flatten(1).sum(1), weights.flatten(1).sum(1)
        return LossTerm((sums / totals.where(totals != 0, 1)).sum(), float(len(masks)))

    def _is_hard(self, losses: Tensor, is_labeled: Tensor | None) -> Tensor:
        """Which pixels are hard, bool [N, H, W]; those with a NaN loss are, so that it is noticed."""
        is_labeled = torch.ones_like(losses, dtype=torch.bool) if is_labeled is None else is_labeled
        ranked = losses.masked_fill(~is_labeled, -1).flatten(1)  # ignored ones come last
        is_hard = ~(ranked <= self.loss_threshold)
        k = math.ceil(self.min_kept * ranked.shape[1])
        if k > 0:
            num_kept = (to_float64(is_labeled.flatten(1).sum(1, keepdim=True)) * self.min_kept).ceil().long()
            hardest = ranked.topk(k, dim=1).values
            is_hard |= ~(ranked < hardest.gather(1, (num_kept - 1).clamp(min=0).to(ranked.device)))
        return is_hard.view_as(is_labeled) & is_labeled


@register.loss("pixel_bce")
class PixelBinaryCrossEntropy:
    """Sigmoid cross-entropy of each pixel with its gray value / 255: the mean over all pixels.

    Outputs are logits [N, 1, H, W] or [N, H, W].
    """

    def count(self, batch: Batch) -> float:
        return float(len(masks_of("pixel_bce", batch)))

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        masks = masks_of("pixel_bce", batch)
        logits, targets = binary_targets("pixel_bce", outputs, masks)
        is_inside = batch.is_inside()
        if is_inside is None:
            total = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
            return LossTerm(total / _area(masks), float(len(masks)))
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return LossTerm(sum_shares(losses * is_inside, batch), float(len(masks)))


class MaskTargets:
    """Masks of class ids as targets of the loss that messages name; pixels of `ignore_index` are left out."""

    def __init__(self, loss: str, num_classes: int, ignore_index: int | None) -> None:
        self.loss = loss
        self.num_classes = num_classes
        self.ignore_index = ignore_index

    def masks(self, batch: Batch) -> Tensor:
        masks = masks_of(self.loss, batch)
        if self.ignore_index is None and (is_inside := batch.is_inside()) is not None:
            return masks.long().masked_fill(~is_inside, _PADDING)
        return masks

    def find_unknown_id(self, batch: Batch) -> tuple[int, str] | None:
        """The first sample of a batch on the host with an id that is no class, and a message."""
        masks = self.masks(batch)
        is_labeled = self.is_labeled(masks)
        known = masks if is_labeled is None else masks.masked_fill(~is_labeled, 0)
        if known.numel() == 0 or int(known.max()) < self.num_classes:
            return None
        sample = int(batch.ids[int((known.flatten(1).amax(1) >= self.num_classes).nonzero()[0])])
        return sample, self._unknown_id(f"the mask of sample {sample} contains the id {int(known.max())}")

    def logits(self, outputs: Tensor, masks: Tensor) -> Tensor:
        """The outputs in full precision, [N, C, H, W]; DataError if they do not match masks and classes."""
        if outputs.ndim != 4 or outputs.shape[1] != self.num_classes:
            raise DataError(
                f"{self.loss}: outputs of shape {list(outputs.shape)} do not match data of"
                f" {pluralize(self.num_classes, 'class')}; expected [N, {self.num_classes}, H, W]"
            )
        _check_size(self.loss, outputs, masks)
        return to_full_precision(outputs)

    def is_labeled(self, masks: Tensor) -> Tensor | None:
        """Which pixels count, bool [N, H, W]; None for all."""
        if self.ignore_index is None:
            return None if masks.dtype == torch.uint8 else masks != _PADDING
        return masks != self.ignore_index

    def class_counts(self, masks: Tensor) -> Tensor:
        """The number of pixels of each class, int64 [C]."""
        if masks.device.type == "cpu":
            counts = torch.bincount(masks.flatten(), minlength=self.num_classes)[: self.num_classes]
        else:  # where bincount would wait for the largest id
            counts = torch.stack([(masks == number).sum() for number in range(self.num_classes)])
        if self.ignore_index is not None and self.ignore_index < self.num_classes:
            counts[self.ignore_index] = 0
        return counts

    def cross_entropy(
        self, logits: Tensor, masks: Tensor, weights: Tensor | None = None, label_smoothing: float = 0.0
    ) -> Tensor:
        """The loss of each pixel, [N, H, W], 0 where it is ignored."""
        ignored = _PADDING if self.ignore_index is None else self.ignore_index
        try:
            # Summed by the caller: the sum inside this function is not deterministic on CUDA.
            return F.cross_entropy(
                logits,
                masks.long(),
                weight=weights,
                ignore_index=ignored,
                reduction="none",
                label_smoothing=label_smoothing,
            )
        except IndexError as error:
            raise DataError(self._unknown_id(f"a mask contains an id that is no class ({error})")) from error

    def _unknown_id(self, found: str) -> str:
        if self.num_classes == 1:
            expected = "expected class ids, and there is only one class; for gray masks use pixel_bce"
        else:
            last, ignored = self.num_classes - 1, self.ignore_index
            hint = "set ignore_index to ignore pixels" if ignored is None else f"or {ignored} (ignore_index)"
            expected = f"expected 0 to {last}, {hint}; a transform's mask_fill is an id too"
        return f"{self.loss}: {found}; {expected}"


def masks_of(loss: str, batch: Batch) -> Tensor:
    """The masks of a batch, [N, H, W]."""
    if "mask" not in batch:
        raise DataError(f"{loss} needs masks: {batch.describe_missing('mask')}")
    masks: Tensor = batch["mask"]
    return masks


def binary_targets(loss: str, outputs: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and targets from 0 to 1, both [N, H, W], of outputs [N, 1, H, W] or [N, H, W] and gray masks."""
    logits = outputs.squeeze(1) if outputs.ndim == 4 and outputs.shape[1] == 1 else outputs
    if logits.ndim != 3:
        raise DataError(
            f"{loss}: got outputs of shape {list(outputs.shape)}, expected one value for each pixel, [N, 1, H, W], and"
            " gray masks from 0 to 255"
        )
    _check_size(loss, logits, masks)
    logits = to_full_precision(logits)
    return logits, masks.to(logits.dtype) / 255


def _pixel_weights(
    class_weights: ClassWeights | None, logits: Tensor, masks: Tensor, is_counted: Tensor | None
) -> Tensor | None:
    """The weight of each pixel, [N, H, W]: that of its class, 0 where it does not count; None if all weigh 1."""
    if class_weights is None:
        return None if is_counted is None else is_counted.float()
    weights = class_weights.to(logits)
    own = weights[masks.long().clamp(min=0, max=len(weights) - 1)]
    return own if is_counted is None else own * is_counted


def sum_shares(pixels: Tensor, batch: Batch) -> Tensor:
    """The sum of pixels [N, H, W] over those of an image; where images differ in size, each over its own."""
    if IMAGE_SIZE not in batch:
        return pixels.sum() / _area(pixels)
    areas: Tensor = batch[IMAGE_SIZE].prod(1).to(pixels.device, non_blocking=True)
    return (pixels.flatten(1).sum(1) / areas).sum()


def _area(masks: Tensor) -> int:
    return masks.shape[-2] * masks.shape[-1]


def _check_size(loss: str, outputs: Tensor, masks: Tensor) -> None:
    if outputs.shape[0] == masks.shape[0] and outputs.shape[-2:] == masks.shape[-2:]:
        return
    raise DataError(
        f"{loss}: {_describe(outputs, 'output')} do not match {_describe(masks, 'mask')}; the task must resize outputs"
        " to the masks"
    )


def _describe(planes: Tensor, noun: str) -> str:
    return f"{pluralize(len(planes), noun)} of {planes.shape[-1]}×{planes.shape[-2]} pixels"
