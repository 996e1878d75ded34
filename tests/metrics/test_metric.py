"""The metric contract: states that merge, values with a direction, losses as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.data.batch import Batch
from paceline.losses.classification import BinaryCrossEntropy, CrossEntropy
from paceline.metrics.classification import Auroc, ConfusionMatrix, MeanAveragePrecision, MultiLabel, TopK
from paceline.metrics.metric import (
    LossMetrics,
    MetricValues,
    State,
    declared_values,
    is_higher_better,
    merge_states,
    pack,
    unpack,
)
from paceline.metrics.saliency import Saliency
from paceline.metrics.segmentation import BoundaryF, Segmentation
from paceline.metrics.video import PerVideo


class Silent:
    """Says nothing of its values."""

    def update(self, predictions: Any, batch: Batch) -> State:
        return {}

    def compute(self, state: State) -> MetricValues:
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


# States


def state_of(count: int, values: list[float]) -> State:
    return {"count": torch.tensor(count), "counts": torch.tensor([count, 1]), "values": torch.tensor(values)}


def test_integers_add_and_floats_are_joined() -> None:
    folded = merge_states([state_of(2, [0.5]), state_of(3, [0.25, -1.0]), state_of(-1, [])])
    assert folded["count"].item() == 4
    assert folded["counts"].tolist() == [4, 3]
    assert folded["counts"].dtype == torch.int64
    assert folded["values"].tolist() == [0.5, 0.25, -1.0]


def test_rows_are_joined_along_the_first_axis() -> None:
    folded = merge_states([{"rows": torch.zeros(2, 3)}, {"rows": torch.ones(1, 3)}])
    assert folded["rows"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]


def test_one_state_is_itself_and_no_state_is_empty() -> None:
    alone = state_of(2, [0.5])
    assert all(torch.equal(alone[name], value) for name, value in merge_states([alone]).items())
    assert merge_states([]) == {}


def test_the_states_are_left_as_they_were() -> None:
    states = [state_of(2, [0.5]), state_of(3, [0.25])]
    merge_states(states)
    assert states[0]["count"] == 2
    assert states[0]["values"].tolist() == [0.5]


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.lists(st.floats(width=32, allow_nan=False))), min_size=2),
    st.data(),
)
def test_neighbors_may_be_folded_first(parts: list[tuple[int, list[float]]], data: st.DataObject) -> None:
    states = [state_of(*part) for part in parts]
    cut = data.draw(st.integers(1, len(states) - 1))
    whole, halves = merge_states(states), merge_states([merge_states(states[:cut]), merge_states(states[cut:])])
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_packed_states_come_back_as_they_were() -> None:
    state = {**state_of(2, [0.5, -0.0, float("nan")]), "double": torch.zeros(0, 3, dtype=torch.float64)}
    packed = pack(state)
    assert (packed.dtype, packed.ndim) == (torch.uint8, 1)
    returned = unpack(packed)
    assert returned.keys() == state.keys()
    for name, value in state.items():
        assert returned[name].dtype == value.dtype
        assert returned[name].shape == value.shape
        assert returned[name].numpy().tobytes() == value.numpy().tobytes()


def test_no_state_packs_into_nothing() -> None:
    assert len(pack({})) == 0
    assert unpack(pack({})) == {}


# Losses as metrics


def loss_values(metric: LossMetrics, logits: Tensor, labels: Tensor, size: int) -> MetricValues:
    parts = zip(torch.split(logits, size), torch.split(labels, size), strict=True)
    return metric.compute(merge_states(metric.update(part, Batch(label=truth)) for part, truth in parts))


def test_losses_are_the_means_over_all_samples() -> None:
    logits, labels = (torch.randn(23, 4), torch.randint(4, (23,)))
    weights = [1.0, 2.0, 0.5, 4.0]
    metric = LossMetrics(
        {"cross_entropy": CrossEntropy(0.1, weights), "bce": BinaryCrossEntropy()},
        {"cross_entropy": 1.0, "bce": 0.5},
    )
    found = loss_values(metric, logits, labels, 5)
    entropy = torch.nn.functional.cross_entropy(
        logits, labels, weight=torch.tensor(weights), label_smoothing=0.1
    ).item()
    binary = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, torch.nn.functional.one_hot(labels, 4).float()
    ).item()
    assert found == pytest.approx({"cross_entropy": entropy, "bce": binary, "loss": entropy + 0.5 * binary}, rel=1e-6)


def test_loss_states_are_rows_in_double_precision_without_gradient() -> None:
    logits, labels = (torch.randn(6, 3), torch.randint(3, (6,)))
    metric = LossMetrics({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0})
    state = metric.update(logits.requires_grad_(), Batch(label=labels))
    assert {(tuple(value.shape), value.dtype, value.requires_grad) for value in state.values()} == {
        ((1,), torch.float64, False)
    }
    assert metric.compute(state).keys() == {"cross_entropy", "loss"}


def test_a_loss_over_nothing_is_left_out() -> None:
    metric = LossMetrics({"cross_entropy": CrossEntropy(class_weights=[0.0, 1.0])}, {"cross_entropy": 1.0})
    assert loss_values(metric, torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), 2) == {}
