"""Figures for images with one label or several: batch["label"] against logits [N, C].

A sample whose logits are not numbers never counts as right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.counting import counted
from paceline.core.errors import DataError
from paceline.data.batch import Batch
from paceline.metrics.state import Figures, State


class TopK:
    """The share of samples whose label is among the k best classes, as "top1", "top5" and so on.

    Of classes with equal scores the one with the lower number is ahead. A k above the number of classes
    has no figure.
    """

    def __init__(self, k: Sequence[int] = (1, 5)) -> None:
        self.k = k

    def measure(self, predictions: Tensor, batch: Batch) -> State:
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

    def figures(self, state: State) -> Figures:
        """Shares from 0 to 1."""
        num_samples = int(state["samples"])
        return {name: int(right) / num_samples for name, right in state.items() if name != "samples"}


class ConfusionMatrix:
    """How often each class was taken for which, and "precision", "recall" and "f1" averaged over classes.

    "confusion" is int64 [C, C], rows the truth and columns the prediction. A class that never occurs or is
    never predicted has 0 where a figure would divide by 0. A sample without a prediction (logits that are not
    numbers) stands in no column, and lowers the recall.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def measure(self, predictions: Tensor, batch: Batch) -> State:
        """The counts of one batch, int64 [C, C + 1]: the last column is for samples without a prediction."""
        logits = predictions.detach()
        labels = _class_numbers("confusion_matrix", batch)
        check_classes("confusion_matrix", self.num_classes, logits, labels)
        width = self.num_classes + 1
        predicted = logits.argmax(dim=1).masked_fill(logits.isnan().any(dim=1), self.num_classes)
        cells = (labels * width + predicted).cpu()
        return {"counts": torch.bincount(cells, minlength=self.num_classes * width).view(-1, width)}

    def figures(self, state: State) -> Figures:
        """The matrix and the averages."""
        confusion = state["counts"][:, : self.num_classes]
        right = confusion.diagonal()
        wrongly = confusion.sum(dim=0) - right
        missed = state["counts"].sum(dim=1) - right
        return {"confusion": confusion.contiguous(), **_class_averages(right, wrongly, missed)}


class MultiLabel:
    """Figures for several labels per sample; a class is predicted where its sigmoid is above `threshold`.

    "precision", "recall" and "f1" are averaged over classes (0 where one would divide by 0), "micro_f1" is
    over all labels, "accuracy" the share of right labels, "exact_match" that of samples with no label wrong.
    """

    def __init__(self, num_classes: int, threshold: float = 0.5) -> None:
        self.num_classes = num_classes
        # Comparing logits with the logit of the threshold is the same, and rounds nothing on the way.
        self.least_logit = math.log(threshold / (1 - threshold))

    def measure(self, predictions: Tensor, batch: Batch) -> State:
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

    def figures(self, state: State) -> Figures:
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
    classes = counted(num_classes, "class")
    if logits.shape[1] != num_classes:
        raise DataError(f"{metric}: the data have {classes}, but the model tells {logits.shape[1]} apart")
    if labels.ndim == 2 and labels.shape[1] != num_classes:
        raise DataError(
            f"{metric}: the data have {classes}, but samples have {counted(labels.shape[1], 'label')} each; "
            "several labels per sample are given as one yes or no for each class"
        )
