"""Metrics for how well scores put samples in order, class by class: batch["label"] against logits [N, C]."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.metrics.classification import check_classes
from paceline.metrics.metric import Figures, State


class Ranking(ABC):
    """A metric of each class, averaged over those that have it; exact, from the scores of all samples.

    With one label per sample each class is held against the rest by its softmax probability (of two classes
    only the second is), with several labels each by its own logit. The metric is left out if no class has it,
    or if a score is not a number.
    """

    name: str

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.higher_is_better = {self.name: True}

    @abstractmethod
    def worth(self, scores: Tensor, positive: Tensor) -> float | None:
        """The metric of one class from its scores [N] and which samples have it [N]; None if it has none."""

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """The logits [N, C] and the labels, [N, 1] or [N, C]: floats, which are joined and not added."""
        labels = batch["label"]
        check_classes(self.name, self.num_classes, predictions, labels)
        columns = labels.unsqueeze(1) if labels.ndim == 1 else labels
        return {"logits": predictions.detach().float().cpu(), "labels": columns.float().cpu()}

    def compute(self, state: State) -> Figures:
        """The mean over classes, if it is defined."""
        # In float64, where far fewer confident predictions round to the same probability.
        logits, labels = state["logits"].double(), state["labels"]
        if labels.shape[1] == self.num_classes:
            scores, truth = logits, labels > 0.5
        else:
            first = 1 if self.num_classes == 2 else 0
            scores = logits.softmax(dim=1)[:, first:]
            truth = labels == torch.arange(first, self.num_classes)
        if scores.isnan().any():
            return {}
        each = [self.worth(column, positive) for column, positive in zip(scores.T, truth.T, strict=True)]
        defined = [worth for worth in each if worth is not None]
        return {self.name: math.fsum(defined) / len(defined)} if defined else {}


@register.metric("auroc")
class Auroc(Ranking):
    """The area under the ROC curve, with equal scores counted as half, of classes with positives and negatives."""

    name = "auroc"

    def worth(self, scores: Tensor, positive: Tensor) -> float | None:
        """The Mann-Whitney statistic as a share of all pairs; in doubled ranks everything is a whole number."""
        num_positive = int(positive.sum())
        num_negative = len(positive) - num_positive
        if num_positive == 0 or num_negative == 0:
            return None
        _, place, repeats = torch.unique(scores, return_inverse=True, return_counts=True)
        doubled_ranks = 2 * repeats.cumsum(0) - repeats + 1
        doubled_wins = int(doubled_ranks[place[positive]].sum()) - num_positive * (num_positive + 1)
        return doubled_wins / (2 * num_positive * num_negative)


@register.metric("map")
class MeanAveragePrecision(Ranking):
    """The mean of the precision at each positive, without interpolation, of classes with positives: "map".

    Samples with equal scores have the precision of all of them together.
    """

    name = "map"

    def worth(self, scores: Tensor, positive: Tensor) -> float | None:
        """The sum over score levels of precision there times the share of positives there."""
        num_positive = int(positive.sum())
        if num_positive == 0:
            return None
        _, place, repeats = torch.unique(-scores, return_inverse=True, return_counts=True)
        found = torch.bincount(place[positive], minlength=len(repeats))
        precision = found.cumsum(0).double() / repeats.cumsum(0)
        return math.fsum((found * precision).tolist()) / num_positive
