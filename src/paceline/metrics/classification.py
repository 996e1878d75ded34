"""Metrics for images with one label or several: batch["label"] against logits [N, C].

A sample whose logits are not numbers never counts as right.
"""

from __future__ import annotations

import math
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
from paceline.metrics.metric import Figures, State


@register.metric("top_k")
class TopK:
    """The share of samples whose label is among the k best classes, as "top1", "top5" and so on.

    Of classes with equal scores the one with the lower number is ahead. A k above the number of classes
    has no metric.
    """

    def __init__(self, k: Annotated[Sequence[Count], Field(min_length=1)] = (1, 5)) -> None:
        self.k = k
        self.higher_is_better = {f"top{k}": True for k in self.k}

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """How many samples are right at each k, and how many there are."""
        logits = predictions.detach()  # [N, C]
        labels = _class_numbers("top_k", batch).unsqueeze(1)  # [N, 1]
        num_samples, num_classes = logits.shape
        target = logits.gather(1, labels)
        lower = torch.arange(num_classes, device=logits.device) < labels
        ahead = ((logits > target) | ((logits == target) & lower)).sum(dim=1)
        ahead[logits.isnan().any(dim=1)] = num_classes
        right = {f"top{k}": (ahead < k).sum().cpu() for k in self.k if k <= num_classes}
        return {**right, "samples": torch.tensor(num_samples)}

    def compute(self, state: State) -> Figures:
        """Shares from 0 to 1."""
        num_samples = int(state["samples"])
        return {name: int(right) / num_samples for name, right in state.items() if name != "samples"}


_AVERAGES = ("precision", "recall", "f1")


@register.metric("confusion_matrix")
class ConfusionMatrix:
    """How often each class was taken for which, and "precision", "recall" and "f1" averaged over classes.

    "confusion" is int64 [C, C], rows the truth and columns the prediction. A class that never occurs or is
    never predicted has 0 where a metric would divide by 0. A sample without a prediction (logits that are not
    numbers) stands in no column, and lowers the recall.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.higher_is_better = dict.fromkeys(_AVERAGES, True)

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """The counts of one batch, int64 [C, C + 1]: the last column is for samples without a prediction."""
        logits = predictions.detach()
        labels = _class_numbers("confusion_matrix", batch)
        check_classes("confusion_matrix", self.num_classes, logits, labels)
        width = self.num_classes + 1
        predicted = logits.argmax(dim=1).masked_fill(logits.isnan().any(dim=1), self.num_classes)
        cells = (labels * width + predicted).cpu()
        return {"counts": torch.bincount(cells, minlength=self.num_classes * width).view(-1, width)}

    def compute(self, state: State) -> Figures:
        """The matrix and the averages."""
        confusion = state["counts"][:, : self.num_classes]
        right = confusion.diagonal()
        wrongly = confusion.sum(dim=0) - right
        missed = state["counts"].sum(dim=1) - right
        return {"confusion": confusion.contiguous(), **_class_averages(right, wrongly, missed)}


@register.metric("multi_label")
class MultiLabel:
    """Metrics for several labels per sample; a class is predicted where its sigmoid is above `threshold`.

    "precision", "recall" and "f1" are averaged over classes (0 where one would divide by 0), "micro_f1" is
    over all labels, "accuracy" the share of right labels, "exact_match" that of samples with no label wrong.
    """

    def __init__(self, num_classes: int, threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5) -> None:
        self.num_classes = num_classes
        # Comparing logits with the logit of the threshold is the same, and rounds nothing on the way.
        self.least_logit = math.log(threshold / (1 - threshold))
        self.higher_is_better = dict.fromkeys((*_AVERAGES, "micro_f1", "exact_match", "accuracy"), True)

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """Counts for each class [C] and the number of samples that match exactly."""
        logits = predictions.detach().float()
        check_classes("multi_label", self.num_classes, logits, batch["label"])
        truth = _truth(batch["label"], logits)
        predicted = torch.where(logits.isnan(), ~truth, logits > self.least_logit)
        counts = {
            "tp": (predicted & truth).sum(dim=0),
            "fp": (predicted & ~truth).sum(dim=0),
            "fn": (~predicted & truth).sum(dim=0),
            "tn": (~predicted & ~truth).sum(dim=0),
            "exact": (predicted == truth).all(dim=1).sum(),
        }
        return {name: count.cpu() for name, count in counts.items()} | {"samples": torch.tensor(len(logits))}

    def compute(self, state: State) -> Figures:
        """Shares from 0 to 1."""
        right, wrongly, missed = state["tp"], state["fp"], state["fn"]
        num_samples = int(state["samples"])
        num_right = int((right + state["tn"]).sum())
        twice = 2 * int(right.sum())
        return {
            **_class_averages(right, wrongly, missed),
            "micro_f1": twice / max(1, twice + int(wrongly.sum()) + int(missed.sum())),
            "exact_match": int(state["exact"]) / num_samples,
            "accuracy": num_right / (num_samples * self.num_classes),
        }


def _class_averages(right: Tensor, wrongly: Tensor, missed: Tensor) -> Figures:
    """Means over classes, from the counts [C] of true positives, false positives and false negatives."""
    return {
        "precision": _mean_ratio(right, right + wrongly),
        "recall": _mean_ratio(right, right + missed),
        "f1": _mean_ratio(2 * right, 2 * right + wrongly + missed),
    }


def _mean_ratio(parts: Tensor, wholes: Tensor) -> float:
    # Where the whole is 0 the part is 0 too, and so is the ratio.
    ratios = (parts.double() / wholes.clamp(min=1)).tolist()
    return math.fsum(ratios) / len(ratios)


def _truth(labels: Tensor, logits: Tensor) -> Tensor:
    """Which classes each sample has, bool [N, C]."""
    if labels.ndim == 2:
        return labels > 0.5
    return labels.unsqueeze(1) == torch.arange(logits.shape[1], device=logits.device)


def _class_numbers(metric: str, batch: Batch) -> Tensor:
    labels: Tensor = batch["label"]
    if labels.ndim != 1:
        raise DataError(
            f"{metric} takes one label per sample, got labels of shape {list(labels.shape)}; "
            "use multi_label or auroc for several labels per sample"
        )
    return labels


def check_classes(metric: str, num_classes: int, logits: Tensor, labels: Tensor) -> None:
    """Raise unless logits [N, C] and labels, [N] or [N, C], are of that many classes."""
    classes = pluralize(num_classes, "class")
    if logits.shape[1] != num_classes:
        raise DataError(f"{metric}: the data have {classes}, but the model tells {logits.shape[1]} apart")
    if labels.ndim == 2 and labels.shape[1] != num_classes:
        raise DataError(
            f"{metric}: the data have {classes}, but samples have {pluralize(labels.shape[1], 'label')} each; "
            "several labels per sample are given as one yes or no for each class"
        )
