"""How well features separate the classes, without training: a cheap check of pretraining."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.metrics.metric import MetricValues, State

_NEIGHBORS = 20
_MIN_SAMPLES = 4  # samples
_RIDGE = 1e-3  # times the number of samples
_BLOCK = 1024  # samples compared with all others at a time


class FeatureAccuracy:
    """Accuracies of `predictions.features` [N, D] on the evaluated split alone.

    - "knn_top1": each sample gets the most frequent class of its 20 nearest neighbors by cosine, itself excluded.
    - "linear_top1": a ridge regression onto classes, fitted on the samples with even ids, measured on the others.
    """

    higher_is_better = {"knn_top1": True, "linear_top1": True}

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def update(self, predictions: Any, batch: Batch) -> State:
        """The features and labels of one batch; nothing where labels are missing."""
        if "label" not in batch or batch["label"].ndim != 1:
            return {}
        columns = {"feature": predictions.features.detach().cpu().double(), "label": batch["label"].cpu().double()}
        return {**columns, "sample": batch.ids.cpu().double()}

    def compute(self, state: State) -> MetricValues:
        if "feature" not in state or len(state["feature"]) < _MIN_SAMPLES:
            return {}
        features, labels = torch.nn.functional.normalize(state["feature"], dim=1), state["label"].long()
        return {
            "knn_top1": _knn_accuracy(features, labels, self.num_classes),
            "linear_top1": _linear_accuracy(features, labels, state["sample"].long() % 2 == 0, self.num_classes),
        }


def _knn_accuracy(features: Tensor, labels: Tensor, num_classes: int) -> float:
    number = min(_NEIGHBORS, len(features) - 1)
    correct = 0
    for start in range(0, len(features), _BLOCK):
        rows = torch.arange(start, min(start + _BLOCK, len(features)))
        similarity = features[rows] @ features.T
        similarity[torch.arange(len(rows)), rows] = -torch.inf
        nearest = labels[similarity.topk(number, 1).indices]  # [rows, k]
        votes = torch.nn.functional.one_hot(nearest, num_classes).sum(1)
        correct += int((votes.argmax(1) == labels[rows]).sum())
    return correct / len(features)


def _linear_accuracy(features: Tensor, labels: Tensor, is_fitted: Tensor, num_classes: int) -> float:
    own = features[is_fitted]
    scaled = (features - own.mean(0)) / own.std(0).clamp(min=1e-12)  # the ridge treats all features alike
    inputs = torch.cat([scaled, torch.ones(len(features), 1, dtype=features.dtype)], 1)
    fitted, targets = inputs[is_fitted], torch.nn.functional.one_hot(labels[is_fitted], num_classes).to(inputs)
    ridge = _RIDGE * len(fitted) * torch.eye(inputs.shape[1], dtype=inputs.dtype)
    weights = torch.linalg.solve(fitted.T @ fitted + ridge, fitted.T @ targets)
    rest = ~is_fitted
    return float(((inputs[rest] @ weights).argmax(1) == labels[rest]).double().mean())
