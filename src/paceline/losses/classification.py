"""Losses for images with one label or several: batch["label"] against logits [N, C]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.arguments import NonNegative, PartialShare, Positive
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.losses.class_weights import ClassNumbers, full_precision
from paceline.losses.loss_term import LossTerm

_ROUNDING = 1e-3


@register.loss("cross_entropy")
class CrossEntropy:
    """Softmax cross-entropy with class numbers int64 [N] or with soft targets, float [N, C].

    The fraction is torch's mean: over samples, or with class weights over the weights of the samples' classes. A soft
    target weighs what its classes weigh, each by its share: as much as the class itself if all of it is of one.
    """

    def __init__(self, label_smoothing: PartialShare = 0.0, class_weights: Sequence[NonNegative] | None = None) -> None:
        self.label_smoothing = label_smoothing
        self.weights = None if class_weights is None else ClassNumbers("class_weights", class_weights)

    def count(self, batch: Batch) -> float:
        """The number of samples, or the sum of the weights of their classes."""
        labels = _labels("cross_entropy", batch)
        if labels.ndim == 2:
            _check_shares(labels, batch)
        if self.weights is None:
            return float(len(labels))
        return self.weights.total(labels) if labels.ndim == 1 else self.weights.weighted(labels.double().sum(0))

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        """The loss, summed over samples, and what to divide it by."""
        logits, labels = full_precision(outputs), _labels("cross_entropy", batch)
        weights = None if self.weights is None else self.weights.beside(logits)
        soft = labels.ndim == 2
        if soft:
            if not labels.is_floating_point():
                raise DataError(
                    f"cross_entropy takes one label per sample, got labels of shape {list(labels.shape)}; "
                    "use the loss bce for several labels per sample"
                )
            labels = _dense_targets("cross_entropy", labels, logits)
        numerator = F.cross_entropy(
            logits, labels, weight=weights, reduction="sum", label_smoothing=self.label_smoothing
        )
        if weights is None:
            return LossTerm(numerator, float(len(labels)))
        return LossTerm(numerator, (labels * weights).sum() if soft else weights[labels].sum())


@register.loss("bce")
class BinaryCrossEntropy:
    """Sigmoid cross-entropy, where each class is a yes or no of its own: the mean over samples and classes.

    Targets are [N, C] (bool, integer or float), or class numbers [N]: yes for that class, no for all others.
    Label smoothing draws targets [N, C] towards 1/2; class numbers have its share spread over all classes.
    """

    def __init__(self, label_smoothing: PartialShare = 0.0, positive_weights: Sequence[Positive] | None = None) -> None:
        self.label_smoothing = label_smoothing
        self.weights = None if positive_weights is None else ClassNumbers("positive_weights", positive_weights)

    def count(self, batch: Batch) -> float:
        """The number of samples."""
        return float(len(_labels("bce", batch)))

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        """The loss, averaged over classes and summed over samples, and the number of samples."""
        logits, labels = full_precision(outputs), _labels("bce", batch)
        weights = None if self.weights is None else self.weights.beside(logits)
        total = F.binary_cross_entropy_with_logits(
            logits, self._targets(labels, logits), pos_weight=weights, reduction="sum"
        )
        # Before the forward pass class numbers do not tell C, so the numerator is divided by it here:
        # the result is the mean over N * C all the same.
        return LossTerm(total / logits.shape[1], float(len(labels)))

    def _targets(self, labels: Tensor, logits: Tensor) -> Tensor:
        smoothing = self.label_smoothing
        if labels.ndim == 1:
            off = smoothing / logits.shape[1]
            return torch.full_like(logits, off).scatter_(1, labels.unsqueeze(1), 1 - smoothing + off)
        targets = _dense_targets("bce", labels, logits)
        return targets if smoothing == 0 else targets * (1 - smoothing) + smoothing / 2


def _labels(loss: str, batch: Batch) -> Tensor:
    if "label" not in batch:
        advice = f"use data with labels, or pixel_{loss} for masks" if "mask" in batch else "use data with labels"
        raise DataError(f"{loss} compares outputs with labels, and these samples have none; {advice}")
    labels: Tensor = batch["label"]
    return labels


def _check_shares(labels: Tensor, batch: Batch) -> None:
    """Raise DataError if the targets [N, C] of a sample, as it was read, are several labels and not shares of one."""
    totals = labels.double().sum(1)
    wrong = ((totals - 1).abs() > _ROUNDING).nonzero().flatten().tolist()
    if wrong:
        raise DataError(
            f"cross_entropy takes one label per sample, and the targets of sample {int(batch.ids[wrong[0]])} add up to"
            f" {totals[wrong[0]]:g}; for several labels use the loss bce, and multi_label: true of the task"
        )


def _dense_targets(loss: str, labels: Tensor, logits: Tensor) -> Tensor:
    if labels.shape != logits.shape:
        raise DataError(
            f"{loss}: labels of shape {list(labels.shape)} do not fit outputs of shape {list(logits.shape)}; "
            "samples need one target for each class of the model"
        )
    return labels.to(logits.dtype)
