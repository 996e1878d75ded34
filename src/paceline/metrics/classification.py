"""Classification metrics: logits [N, C] against batch["label"], class ids [N] or multi-label targets [N, C].

A sample with NaN logits never counts as correct. torchmetrics is not used: its states cannot be merged in sample order,
so its values depend on the number of processes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from paceline.core.arguments import Count
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.text import pluralize
from paceline.data.batch import Batch
from paceline.metrics.metric import MetricValues, State

_MANY_CLASSES = 100  # above this, predictions keep the probability of the predicted class alone
_ELEMENTS = 1 << 15  # per softmax call: torch computes as many on one thread, so bit-identically everywhere


@register.metric("top_k")
class TopK:
    """Top-k accuracy for each `k`, as "top1", "top5" and so on.

    Of classes with equal scores, the one with the lower id ranks higher. A k above the number of classes is not
    reported.
    """

    def __init__(self, k: Annotated[Sequence[Count], Field(min_length=1)] = (1, 5)) -> None:
        self.k = k
        self.higher_is_better = {f"top{k}": True for k in self.k}

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """The number of correct samples at each k, and of all samples."""
        logits = predictions.detach()  # [N, C]
        labels = _class_ids("top_k", batch).unsqueeze(1)  # [N, 1]
        num_samples, num_classes = logits.shape
        target = logits.gather(1, labels)
        lower = torch.arange(num_classes, device=logits.device) < labels
        rank = ((logits > target) | ((logits == target) & lower)).sum(dim=1)
        rank[logits.isnan().any(dim=1)] = num_classes
        correct = {f"top{k}": (rank < k).sum().cpu() for k in self.k if k <= num_classes}
        return {**correct, "samples": torch.tensor(num_samples)}

    def compute(self, state: State) -> MetricValues:
        num_samples = int(state["samples"])
        return {name: int(correct) / num_samples for name, correct in state.items() if name != "samples"}


_AVERAGES = ("precision", "recall", "f1")


@register.metric("confusion_matrix")
class ConfusionMatrix:
    """The confusion matrix, and macro-averaged "precision", "recall" and "f1".

    "confusion" is int64 [C, C]: rows are true classes, columns predicted ones. A ratio with denominator 0 counts as 0.
    A sample with NaN logits is in no column, and lowers the recall.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.higher_is_better = dict.fromkeys(_AVERAGES, True)

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """The counts of one batch, int64 [C, C + 1]; the last column is for samples without a prediction."""
        logits = predictions.detach()
        labels = _class_ids("confusion_matrix", batch)
        _check_classes("confusion_matrix", self.num_classes, logits, labels)
        width = self.num_classes + 1
        predicted = logits.argmax(dim=1).masked_fill(logits.isnan().any(dim=1), self.num_classes)
        cells = (labels * width + predicted).cpu()
        return {"counts": torch.bincount(cells, minlength=self.num_classes * width).view(-1, width)}

    def compute(self, state: State) -> MetricValues:
        confusion = state["counts"][:, : self.num_classes]
        tp = confusion.diagonal()
        fp, fn = confusion.sum(dim=0) - tp, state["counts"].sum(dim=1) - tp
        return {"confusion": confusion.contiguous(), **_macro_averages(tp, fp, fn)}


@register.metric("multi_label")
class MultiLabel:
    """Multi-label metrics; a class is predicted where its sigmoid is above `threshold`.

    "precision", "recall" and "f1" are macro averages (a ratio with denominator 0 counts as 0), "micro_f1" is over all
    labels, "accuracy" is the fraction of correct labels, "exact_match" that of samples with all labels correct.
    """

    def __init__(self, num_classes: int, threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5) -> None:
        self.num_classes = num_classes
        # Comparing logits with the logit of the threshold is equivalent, and rounds nothing.
        self.logit_threshold = math.log(threshold / (1 - threshold))
        self.higher_is_better = dict.fromkeys((*_AVERAGES, "micro_f1", "exact_match", "accuracy"), True)

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """Counts per class [C], and the number of samples that match exactly."""
        logits, labels = predictions.detach().float(), batch["label"]
        _check_classes("multi_label", self.num_classes, logits, labels)
        one_hot = labels if labels.ndim == 2 else labels.unsqueeze(1) == torch.arange(self.num_classes).to(labels)
        target = one_hot > 0.5
        predicted = torch.where(logits.isnan(), ~target, logits > self.logit_threshold)
        counts = {
            "tp": (predicted & target).sum(dim=0),
            "fp": (predicted & ~target).sum(dim=0),
            "fn": (~predicted & target).sum(dim=0),
            "tn": (~predicted & ~target).sum(dim=0),
            "exact": (predicted == target).all(dim=1).sum(),
        }
        return {name: count.cpu() for name, count in counts.items()} | {"samples": torch.tensor(len(logits))}

    def compute(self, state: State) -> MetricValues:
        tp, fp, fn = state["tp"], state["fp"], state["fn"]
        num_samples = int(state["samples"])
        double_tp = 2 * int(tp.sum())
        return {
            **_macro_averages(tp, fp, fn),
            "micro_f1": double_tp / max(1, double_tp + int(fp.sum()) + int(fn.sum())),
            "exact_match": int(state["exact"]) / num_samples,
            "accuracy": int((tp + state["tn"]).sum()) / (num_samples * self.num_classes),
        }


class _RankingMetric(ABC):
    """The mean over classes of a value that depends on how scores rank the samples; exact, from all scores.

    With one label per sample, each class is scored one-vs-rest by its softmax probability (of two classes, only the
    second); with multi-label targets, by its logit. The value is omitted if it is undefined for every class, or if a
    score is NaN.
    """

    name: str

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.higher_is_better = {self.name: True}

    @abstractmethod
    def class_value(self, scores: Tensor, positive: Tensor) -> float | None:
        """The value of one class from its scores [N] and its positives, bool [N]; None if it is undefined."""

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """The logits [N, C] and the labels, [N, 1] or [N, C], as floats, which are concatenated and not summed."""
        labels = batch["label"]
        _check_classes(self.name, self.num_classes, predictions, labels)
        columns = labels.unsqueeze(1) if labels.ndim == 1 else labels
        return {"logits": predictions.detach().float().cpu(), "labels": columns.float().cpu()}

    def compute(self, state: State) -> MetricValues:
        # In float64, far fewer confident predictions round to the same probability.
        logits, labels = state["logits"].double(), state["labels"]
        if labels.shape[1] == self.num_classes:
            scores, targets = logits, labels > 0.5
        else:
            first = 1 if self.num_classes == 2 else 0
            scores = logits.softmax(dim=1)[:, first:]
            targets = labels == torch.arange(first, self.num_classes)
        if scores.isnan().any():
            return {}
        values = (self.class_value(column, positive) for column, positive in zip(scores.T, targets.T, strict=True))
        defined = [value for value in values if value is not None]
        return {self.name: math.fsum(defined) / len(defined)} if defined else {}


@register.metric("auroc")
class Auroc(_RankingMetric):
    """The area under the ROC curve, averaged over classes with positives and negatives; equal scores count half."""

    name = "auroc"

    def class_value(self, scores: Tensor, positive: Tensor) -> float | None:
        """The Mann-Whitney statistic divided by the number of pairs; ranks are doubled to stay integers."""
        num_positive = int(positive.sum())
        num_negative = len(positive) - num_positive
        if num_positive == 0 or num_negative == 0:
            return None
        _, index, repeats = torch.unique(scores, return_inverse=True, return_counts=True)
        doubled_ranks = 2 * repeats.cumsum(0) - repeats + 1
        doubled_wins = int(doubled_ranks[index[positive]].sum()) - num_positive * (num_positive + 1)
        return doubled_wins / (2 * num_positive * num_negative)


@register.metric("map")
class MeanAveragePrecision(_RankingMetric):
    """Average precision without interpolation, averaged over classes with positives, as "map".

    Samples with equal scores share one precision.
    """

    name = "map"

    def class_value(self, scores: Tensor, positive: Tensor) -> float | None:
        """The sum over distinct scores of the precision there, weighted by the fraction of positives there."""
        num_positive = int(positive.sum())
        if num_positive == 0:
            return None
        _, index, repeats = torch.unique(-scores, return_inverse=True, return_counts=True)
        found = torch.bincount(index[positive], minlength=len(repeats))
        precision = found.cumsum(0).double() / repeats.cumsum(0)
        return math.fsum((found * precision).tolist()) / num_positive


class SamplePredictions:
    """The most probable class of each sample, or with `multi_label` those above 0.5.

    Values are tensors: "sample" [N], its id; "file" [N], the id of the sample that names its file (the batch's field
    "first"); "truth" and "predicted", bool [N, C]; "probabilities" [N, C], or with one label among many classes [N, 1],
    that of the predicted class alone. "multi_label" is a bool.
    """

    def __init__(self, num_classes: int, multi_label: bool = False) -> None:
        self.num_classes = num_classes
        self.multi_label = multi_label
        self.higher_is_better: dict[str, bool] = {}

    def update(self, predictions: Tensor, batch: Batch) -> State:
        rows = {
            "sample": batch.ids.cpu().double(),
            "file": batch.get("first", batch.ids).cpu().double(),
            "label": batch["label"].cpu().double(),
        }
        logits = predictions.detach().cpu()
        if self.multi_label or logits.shape[1] <= _MANY_CLASSES:
            return rows | {"logits": logits}
        probability, best = logits.double().softmax(1).max(1, keepdim=True)
        best = best.masked_fill(probability.isnan(), -1)
        return rows | {"probability": probability.float(), "best": best.double()}

    def compute(self, state: State) -> MetricValues:
        labels, class_ids = state["label"], torch.arange(self.num_classes)
        predicted, probabilities = self._predicted(state, class_ids)
        return {
            "sample": state["sample"].long(),
            "file": state["file"].long(),
            "truth": labels > 0.5 if labels.ndim == 2 else labels.unsqueeze(1) == class_ids,
            "predicted": predicted,
            "probabilities": probabilities,
            "multi_label": self.multi_label,
        }

    def _predicted(self, state: State, class_ids: Tensor) -> tuple[Tensor, Tensor]:
        if "probability" in state:
            return state["best"] == class_ids, state["probability"]
        logits = state["logits"]
        predicted = logits > 0 if self.multi_label else logits.argmax(1, keepdim=True) == class_ids
        pieces = (piece.double() for piece in torch.split(logits, max(1, _ELEMENTS // logits.shape[1])))
        probabilities = [(piece.sigmoid() if self.multi_label else piece.softmax(1)).float() for piece in pieces]
        return predicted & ~logits.isnan().any(1, keepdim=True), torch.cat(probabilities)


def _macro_averages(tp: Tensor, fp: Tensor, fn: Tensor) -> MetricValues:
    """Means over classes, from counts [C]."""
    return {
        "precision": _mean_ratio(tp, tp + fp),
        "recall": _mean_ratio(tp, tp + fn),
        "f1": _mean_ratio(2 * tp, 2 * tp + fp + fn),
    }


def _mean_ratio(numerators: Tensor, denominators: Tensor) -> float:
    # Where the denominator is 0 the numerator is 0 too, and so is the ratio.
    ratios = (numerators.double() / denominators.clamp(min=1)).tolist()
    return math.fsum(ratios) / len(ratios)


def _class_ids(metric: str, batch: Batch) -> Tensor:
    labels: Tensor = batch["label"]
    if labels.ndim != 1:
        raise DataError(
            f"{metric} expects one label per sample, got labels of shape {list(labels.shape)}: give the number of the"
            " class (of one-hot labels, their argmax), or set task.multi_label: true for several labels per sample"
        )
    return labels


def _check_classes(metric: str, num_classes: int, logits: Tensor, labels: Tensor) -> None:
    """Raise unless logits [N, C] and labels, [N] or [N, C], have that many classes."""
    classes = pluralize(num_classes, "class")
    if logits.shape[1] != num_classes:
        raise DataError(
            f"model: the data have {classes}, the model outputs {logits.shape[1]} values; build it with num_classes"
        )
    if labels.ndim == 2 and labels.shape[1] != num_classes:
        raise DataError(
            f"{metric}: the data have {classes}, but labels of shape {list(labels.shape)}; several labels per sample"
            " are one 0 or 1 for each class"
        )
