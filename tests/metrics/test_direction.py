"""Which direction is better, as each metric says of its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.losses.classification import CrossEntropy
from paceline.metrics.boundary import BoundaryF
from paceline.metrics.classification import ConfusionMatrix, MultiLabel, TopK
from paceline.metrics.loss import LossMetrics
from paceline.metrics.metric import Figures, State, declared_values, is_higher_better
from paceline.metrics.ranking import Auroc, MeanAveragePrecision
from paceline.metrics.saliency import Saliency
from paceline.metrics.segmentation import Segmentation
from paceline.metrics.video import PerVideo


class Silent:
    """Says nothing of its values."""

    def update(self, predictions: Any, batch: Batch) -> State:
        return {}

    def compute(self, state: State) -> Figures:
        return {}


class Wrapping(Silent):
    higher_is_better: Mapping[str, bool] = {"own": True}

    def __init__(self, *wrapped: Any) -> None:
        self.wrapped = wrapped


class Higher(Silent):
    higher_is_better = True


def saying(declared: Any) -> Any:
    return type("Saying", (Silent,), {"higher_is_better": declared})()


def test_the_metric_says_which_direction_is_better() -> None:
    named, silent = saying({"mae": False, "iou": True, "odd": None}), saying(None)
    for name, expected in (("mae", False), ("averaged_mae", False), ("iou", True), ("averaged_iou", True)):
        assert is_higher_better(name, [silent, named]) is expected
    assert is_higher_better("error", [saying(False), named]) is False
    assert is_higher_better("score", [named, saying(True), saying(True)]) is True
    assert is_higher_better("none of them", [named]) is None
    assert declared_values([silent, saying(True), named]) == ["mae", "iou", "odd"]


def test_wrapped_metrics_are_asked_too() -> None:
    wrapping = Wrapping(Wrapping(saying({"mae": False})), saying(False))
    assert [is_higher_better(name, [wrapping]) for name in ("own", "mae", "error")] == [True, False, False]
    with pytest.raises(ValueError, match=r"higher_is_better .* to Silent$"):
        is_higher_better("error", [Wrapping(Silent())])


@pytest.mark.parametrize("others", [[Silent()], [saying("lower")], [Silent(), Higher()], [saying(False), Higher()]])
def test_what_no_metric_says_is_not_guessed(others: list[Any]) -> None:
    with pytest.raises(ValueError, match="higher_is_better") as caught:
        is_higher_better("error", [saying({"mae": False}), *others])
    assert all(type(each).__name__ in str(caught.value) for each in others)


ALL = [
    TopK([1, 2]),
    ConfusionMatrix(3),
    MultiLabel(3),
    Auroc(3),
    MeanAveragePrecision(3),
    LossMetrics({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}),
    PerVideo([TopK([1]), Auroc(3)]),
]
OF_MAPS = [Saliency(), Saliency(["ber"]), Segmentation(3, None, "abc"), BoundaryF(3, None, None, "abc")]


@pytest.mark.parametrize("metric", [*ALL, *OF_MAPS], ids=lambda metric: type(metric).__name__)
def test_our_metrics_declare_each_value_that_they_report(metric: Any) -> None:
    """One by one: a user's metric that says something of all its values is then the only one that can be meant."""
    if metric in OF_MAPS:
        is_salient = isinstance(metric, Saliency)
        masks = torch.tensor([[[0, 255]]] if is_salient else [[[0, 1]]], dtype=torch.uint8)
        found = metric.update(masks / 255 if is_salient else masks.long(), Batch(id=torch.arange(1), mask=masks))
    else:
        views = torch.eye(3).unsqueeze(1).expand(-1, 2, -1) if isinstance(metric, PerVideo) else torch.eye(3)
        found = metric.update(views, Batch(id=torch.arange(3), label=torch.arange(3)))
    reported = [name for name, value in metric.compute(found).items() if not isinstance(value, Tensor)]
    assert reported
    directions = {name: is_higher_better(name, [metric]) for name in reported}
    lower = {"mae", "ber", "cross_entropy", "loss", "unseen_classes", "absent.c"}
    assert directions == {name: name not in lower for name in reported}
