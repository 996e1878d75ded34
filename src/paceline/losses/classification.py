"""Classification losses: logits [N, C] against batch["label"], class ids [N] or targets [N, C]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.arguments import NonNegative, PartialShare, Positive
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.world import to_float64
from paceline.data.batch import LABEL_FORM, Batch, describe_tensor
from paceline.losses.class_weights import make_class_weights, to_full_precision
from paceline.losses.loss_term import LossTerm

_ROUNDING = 1e-3


@register.loss("cross_entropy")
class CrossEntropy:
    """Softmax cross-entropy of class ids [N] or soft targets, float [N, C].

    It is the mean over samples, or with class weights the weighted mean, as in torch. A soft target
    has the mean weight of its classes, so a one-hot target weighs as much as its class id (in torch it weighs 1).
    """

    def __init__(self, label_smoothing: PartialShare = 0.0, class_weights: Sequence[NonNegative] | None = None) -> None:
        self.label_smoothing = label_smoothing
        self.weights = make_class_weights("class_weights", class_weights)

    def check(self, batch: Batch) -> tuple[int, str] | None:
        """The first sample whose targets [C] do not sum to 1: they are several labels then."""
        labels = labels_of("cross_entropy", batch)
        if labels.ndim == 2:
            return _find_several_labels(labels, batch)
        if self.weights is not None:
            self.weights.sum_over_labels(labels)  # refuses a class without a weight
        return None

    def count(self, batch: Batch) -> Tensor | float:
        """The number of samples, or the sum of the weights of their classes."""
        labels = labels_of("cross_entropy", batch)
        if self.weights is None:
            return float(labels.shape[0])
        if labels.ndim == 1:
            return self.weights.sum_over_labels(labels)
        return self.weights.sum_over_counts(to_float64(labels).sum(0))

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        logits, labels = to_full_precision(outputs), labels_of("cross_entropy", batch)
        weights = None if self.weights is None else self.weights.to(logits)
        is_soft = labels.ndim == 2
        if is_soft:
            if not labels.is_floating_point():
                raise DataError(
                    f"cross_entropy expects one label per sample, got labels of shape {list(labels.shape)}; "
                    "use the loss bce for several labels per sample"
                )
            labels = _dense_targets("cross_entropy", labels, logits)
        numerator = F.cross_entropy(
            logits, labels, weight=weights, reduction="sum", label_smoothing=self.label_smoothing
        )
        if weights is None:
            return LossTerm(numerator, float(labels.shape[0]))
        return LossTerm(numerator, (labels * weights).sum() if is_soft else weights[labels].sum())


@register.loss("bce")
class BinaryCrossEntropy:
    """Sigmoid cross-entropy of each class on its own: the mean over samples and classes.

    Targets are [N, C] (bool, integer or float), or class ids [N], which become one-hot. Label smoothing moves targets
    [N, C] towards 1/2, and spreads that of class ids over all classes.
    """

    def __init__(self, label_smoothing: PartialShare = 0.0, pos_weight: Sequence[Positive] | None = None) -> None:
        self.label_smoothing = label_smoothing
        self.weights = make_class_weights("pos_weight", pos_weight)

    def count(self, batch: Batch) -> float:
        return float(len(labels_of("bce", batch)))

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        """The loss, averaged over classes and summed over samples, and the number of samples."""
        logits, labels = to_full_precision(outputs), labels_of("bce", batch)
        weights = None if self.weights is None else self.weights.to(logits)
        total = F.binary_cross_entropy_with_logits(
            logits, self._targets(labels, logits), pos_weight=weights, reduction="sum"
        )
        # Class ids do not tell C before the forward pass, so the numerator is divided by it here.
        return LossTerm(total / logits.shape[1], float(labels.shape[0]))

    def _targets(self, labels: Tensor, logits: Tensor) -> Tensor:
        smoothing = self.label_smoothing
        if labels.ndim == 1:
            off = smoothing / logits.shape[1]
            return torch.full_like(logits, off).scatter_(1, labels.unsqueeze(1), 1 - smoothing + off)
        targets = _dense_targets("bce", labels, logits)
        return targets if smoothing == 0 else targets * (1 - smoothing) + smoothing / 2


def labels_of(part: str, batch: Batch) -> Tensor:
    """The labels of a batch, class ids [N] or targets [N, C]; DataError names the loss or task that needs them."""
    if "label" not in batch:
        advice = f"; for masks use pixel_{part}" if "mask" in batch else ""
        raise DataError(f"{part} needs labels: {batch.describe_missing('label')}{advice}")
    labels: Tensor = batch["label"]
    if labels.ndim == 1 and labels.is_floating_point():
        raise DataError(
            f"{part} got labels {describe_tensor(labels)}, expected int64 {list(labels.shape)}; {LABEL_FORM}"
        )
    return labels


def _find_several_labels(labels: Tensor, batch: Batch) -> tuple[int, str] | None:
    totals = labels.double().sum(1)
    wrong = ((totals - 1).abs() > _ROUNDING).nonzero().flatten().tolist()
    if not wrong:
        return None
    sample = int(batch.ids[wrong[0]])
    return sample, (
        f"cross_entropy expects one label per sample, and the targets of sample {sample} sum to"
        f" {totals[wrong[0]]:g}; for several labels use the loss bce and task.multi_label: true"
    )


def _dense_targets(loss: str, labels: Tensor, logits: Tensor) -> Tensor:
    if labels.shape != logits.shape:
        raise DataError(
            f"{loss}: labels of shape {list(labels.shape)} do not match outputs of shape {list(logits.shape)}; "
            "samples need one target for each class of the model"
        )
    return labels.to(logits.dtype)
