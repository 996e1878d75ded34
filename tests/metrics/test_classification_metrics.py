import math
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.metrics.classification import Auroc, ConfusionMatrix, MeanAveragePrecision, MultiLabel, TopK
from paceline.metrics.metric import Metric, MetricValues, merge_states

NAN = math.nan


def batch_of(labels: Tensor) -> Batch:
    return Batch(id=torch.arange(len(labels)), label=labels)


def computed(metric: Metric, logits: Tensor, labels: Tensor, sizes: list[int] | None = None) -> MetricValues:
    """Measure in batches of these sizes (one batch of all if none are given), merge, and compute."""
    sizes = sizes or [len(labels)]
    parts = zip(torch.split(logits, sizes), torch.split(labels, sizes), strict=True)
    return metric.compute(merge_states([metric.update(part, batch_of(truth)) for part, truth in parts]))


def drawn(num_samples: int, num_classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Coarse logits, so that ties are common, and labels that they tell something about."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (num_samples,), generator=source)
    logits = torch.randint(-3, 4, (num_samples, num_classes), generator=source).float()
    logits[torch.arange(num_samples), labels] += 1
    return logits, labels


def drawn_several(num_samples: int, num_classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    truth = torch.rand(num_samples, num_classes, generator=source) < 0.4
    logits = torch.randint(-4, 4, (num_samples, num_classes), generator=source) / 2 + 0.25 + truth
    return logits, truth


# Top k


def test_top_k_by_hand() -> None:
    logits = torch.tensor([[0.1, 0.9, 0.5], [0.3, 0.2, 0.1], [1.0, 2.0, 3.0], [5.0, 4.0, 3.0]])
    assert computed(TopK([1, 2, 3]), logits, torch.tensor([2, 0, 2, 2])) == {
        "top1": 0.5,
        "top2": 0.75,
        "top3": 1.0,
    }


def test_top_k_without_ties_is_as_scikit_learn_counts() -> None:
    logits = torch.randn(60, 7, generator=torch.Generator().manual_seed(3))
    labels = drawn(60, 7)[1]
    found = computed(TopK([1, 2, 5]), logits, labels)
    for k in (1, 2, 5):
        expected = oracle.top_k_accuracy_score(labels.numpy(), logits.numpy(), k=k, labels=range(7))
        assert found[f"top{k}"] == pytest.approx(expected)


def test_of_tied_classes_the_lower_number_is_ahead() -> None:
    logits = torch.zeros(4, 4)
    assert computed(TopK([1, 2, 3, 4]), logits, torch.arange(4)) == {
        "top1": 0.25,
        "top2": 0.5,
        "top3": 0.75,
        "top4": 1.0,
    }


def test_top_k_with_ties_is_a_stable_sort() -> None:
    logits, labels = drawn(200, 6)
    order = logits.argsort(dim=1, descending=True, stable=True)
    found = computed(TopK([1, 3]), logits, labels)
    for k in (1, 3):
        assert found[f"top{k}"] == (order[:, :k] == labels[:, None]).any(dim=1).sum().item() / 200


def test_a_k_above_the_number_of_classes_is_not_reported() -> None:
    assert computed(TopK(), *drawn(5, 3)).keys() == {"top1"}
    assert computed(TopK([1, 5]), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64)) == {"top1": 1.0}
    assert computed(TopK([1, 5]), *drawn(5, 5)).keys() == {"top1", "top5"}


def test_logits_that_are_not_numbers_are_never_right() -> None:
    logits = torch.tensor([[NAN, NAN, NAN], [9.0, NAN, 0.0], [NAN, 1.0, 2.0], [0.0, 0.0, math.inf]])
    found = computed(TopK([1, 3]), logits, torch.tensor([0, 0, 0, 2]))
    assert found == {"top1": 0.25, "top3": 0.25}


# Confusion matrix


def macro(truth: Any, predicted: Any, **options: Any) -> dict[str, float]:
    scores = oracle.precision_recall_fscore_support(truth, predicted, average="macro", zero_division=0, **options)
    return dict(zip(("precision", "recall", "f1"), scores[:3], strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_the_confusion_matrix_is_scikit_learns(seed: int) -> None:
    logits, labels = drawn(80, 5, seed)
    labels = torch.where(labels == 4, 3, labels)  # the last class never occurs
    logits[:, 2] = -9  # and class 2 is never predicted
    predicted = logits.argmax(dim=1)
    found = computed(ConfusionMatrix(5), logits, labels)
    assert found.pop("confusion").tolist() == (oracle.confusion_matrix(labels, predicted, labels=range(5)).tolist())
    assert found == pytest.approx(macro(labels, predicted, labels=range(5)))


def test_the_confusion_matrix_by_hand() -> None:
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    found = computed(ConfusionMatrix(2), logits, torch.tensor([0, 0, 1, 1]))
    assert found.pop("confusion").tolist() == [[2, 0], [1, 1]]
    assert found == pytest.approx({"precision": (2 / 3 + 1) / 2, "recall": 0.75, "f1": (4 / 5 + 2 / 3) / 2})


def test_a_sample_without_a_prediction_stands_in_no_column_and_lowers_the_recall() -> None:
    logits = torch.tensor([[1.0, 0.0], [NAN, NAN], [0.0, 1.0]])
    found = computed(ConfusionMatrix(2), logits, torch.tensor([0, 0, 1]))
    assert found.pop("confusion").tolist() == [[1, 0], [0, 1]]
    assert found == pytest.approx({"precision": 1.0, "recall": 0.75, "f1": (2 / 3 + 1) / 2})


# AUROC


def test_auroc_by_hand_with_a_tie() -> None:
    # Pairs (positive, negative): 3 > 1, 3 > 2, 2 > 1 are won and 2 = 2 is half: 3.5 of 4.
    scores, labels = torch.tensor([3.0, 2.0, 1.0, 2.0]), torch.tensor([1, 1, 0, 0])
    logits = torch.stack([torch.zeros(4), scores], dim=1)
    assert computed(Auroc(2), logits, labels) == {"auroc": 0.875}


@pytest.mark.parametrize("num_classes", [2, 3, 6])
def test_auroc_of_single_labels_is_scikit_learns(num_classes: int) -> None:
    logits, labels = drawn(90, num_classes)
    scores = logits.double().softmax(dim=1).numpy()
    expected = (
        oracle.roc_auc_score(labels.numpy(), scores[:, 1])
        if num_classes == 2
        else oracle.roc_auc_score(labels.numpy(), scores, multi_class="ovr", average="macro")
    )
    assert computed(Auroc(num_classes), logits, labels)["auroc"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("num_classes", [1, 2, 5])
def test_auroc_of_several_labels_is_scikit_learns(num_classes: int) -> None:
    logits, truth = drawn_several(70, num_classes)
    expected = oracle.roc_auc_score(truth.int().numpy(), logits.double().sigmoid().numpy(), average="macro")
    for labels in (truth, truth.to(torch.uint8), truth.float()):
        assert computed(Auroc(num_classes), logits, labels)["auroc"] == pytest.approx(expected, abs=1e-12)


def test_classes_without_positives_are_left_out_of_the_auroc() -> None:
    logits, labels = drawn(60, 4)
    labels = torch.where(labels == 2, 3, labels)
    scores = logits.double().softmax(dim=1)
    areas = [oracle.roc_auc_score((labels == c).numpy(), scores[:, c].numpy()) for c in (0, 1, 3)]
    assert computed(Auroc(4), logits, labels)["auroc"] == pytest.approx(sum(areas) / 3, abs=1e-12)


def test_zeros_of_either_sign_tie() -> None:
    logits, truth = torch.tensor([[0.0], [-0.0]]), torch.tensor([[True], [False]])
    assert computed(Auroc(1), logits, truth) == {"auroc": 0.5}


def test_very_confident_predictions_do_not_tie() -> None:
    logits = torch.tensor([[0.0, 20.0], [0.0, 21.0]])  # float32 probabilities are 1 for both
    assert computed(Auroc(2), logits, torch.tensor([0, 1])) == {"auroc": 1.0}


def test_an_undefined_auroc_is_left_out() -> None:
    for num_classes in (1, 2, 3):
        logits = torch.randn(5, num_classes)
        assert computed(Auroc(num_classes), logits, torch.zeros(5, dtype=torch.int64)) == {}
    broken = torch.tensor([[0.0, NAN], [1.0, 0.0]])
    assert computed(Auroc(2), broken, torch.tensor([0, 1])) == {}


# Average precision


def test_average_precision_by_hand_with_a_tie() -> None:
    # By score: a positive (1 of 1), then a positive and a negative together (2 of 3): (1 + 2 / 3) / 2.
    logits, labels = torch.tensor([[3.0], [2.0], [1.0], [2.0]]), torch.tensor([[True], [True], [False], [False]])
    assert computed(MeanAveragePrecision(1), logits, labels) == {"map": (1 + 2 / 3) / 2}


@pytest.mark.parametrize("num_classes", [1, 2, 5])
def test_average_precision_of_several_labels_is_scikit_learns(num_classes: int) -> None:
    logits, truth = drawn_several(70, num_classes)
    expected = oracle.average_precision_score(truth.int().numpy(), logits.double().numpy(), average="macro")
    assert computed(MeanAveragePrecision(num_classes), logits, truth)["map"] == pytest.approx(expected, abs=1e-12)


def test_classes_without_positives_have_no_average_precision() -> None:
    logits, truth = drawn_several(60, 4)
    truth[:, 2] = False
    each = [oracle.average_precision_score(truth[:, c].numpy(), logits[:, c].numpy()) for c in (0, 1, 3)]
    assert computed(MeanAveragePrecision(4), logits, truth)["map"] == pytest.approx(sum(each) / 3, abs=1e-12)
    assert computed(MeanAveragePrecision(4), logits, torch.zeros_like(truth)) == {}


# Several labels


@pytest.mark.parametrize("threshold", [0.5, 0.3, 0.9])
def test_several_labels_are_judged_as_by_scikit_learn(threshold: float) -> None:
    logits, truth = drawn_several(50, 4)
    truth[:, 3] = False  # a class that no sample has
    predicted = (logits.sigmoid() > threshold).int().numpy()
    for labels in (truth, truth.to(torch.uint8), truth.float()):
        expected = macro(truth.int().numpy(), predicted) | {
            "micro_f1": oracle.f1_score(truth.int().numpy(), predicted, average="micro"),
            "exact_match": oracle.accuracy_score(truth.int().numpy(), predicted),
            "accuracy": 1 - oracle.hamming_loss(truth.int().numpy(), predicted),
        }
        assert computed(MultiLabel(4, threshold), logits, labels) == pytest.approx(expected)


def test_single_labels_are_taken_as_one_of_several() -> None:
    logits, labels = drawn(30, 5)
    one_hot = torch.nn.functional.one_hot(labels, 5)
    assert computed(MultiLabel(5), logits, labels) == computed(MultiLabel(5), logits, one_hot)


def test_labels_whose_logits_are_not_numbers_are_never_right() -> None:
    logits, truth = torch.full((2, 2), NAN), torch.tensor([[True, False], [False, False]])
    assert set(computed(MultiLabel(2), logits, truth).values()) == {0.0}


def test_nothing_predicted_and_nothing_there_gives_no_division_by_zero() -> None:
    found = computed(MultiLabel(2), torch.full((3, 2), -1.0), torch.zeros(3, 2, dtype=torch.bool))
    assert found == {
        "precision": 0,
        "recall": 0,
        "f1": 0,
        "micro_f1": 0,
        "exact_match": 1.0,
        "accuracy": 1.0,
    }


# What holds for all of them


def bit_identical(one: MetricValues, other: MetricValues) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) if isinstance(one[name], Tensor) else one[name] == other[name]
        for name in one
    )


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    num_classes=st.integers(1, 6),
    seed=st.integers(0, 1000),
    several=st.booleans(),
)
def test_values_do_not_depend_on_batches(sizes: list[int], num_classes: int, seed: int, several: bool) -> None:
    total = sum(sizes)
    logits, labels = (drawn_several if several else drawn)(total, num_classes, seed)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    logits = logits + noise * (seed % 2)  # with ties, and without
    metrics: list[Metric] = [Auroc(num_classes), MeanAveragePrecision(num_classes), MultiLabel(num_classes)]
    if not several:
        metrics += [TopK([1, 2, 5]), ConfusionMatrix(num_classes)]
    for metric in metrics:
        at_once = computed(metric, logits, labels)
        assert bit_identical(computed(metric, logits, labels, sizes), at_once)
        assert bit_identical(computed(metric, logits, labels, [1] * total), at_once)
        assert all(math.isfinite(value) for name, value in at_once.items() if name != "confusion")


@pytest.mark.parametrize("metric", [TopK(), ConfusionMatrix(5), Auroc(5), MeanAveragePrecision(5), MultiLabel(5)])
def test_states_carry_no_gradient_and_add_only_whole_numbers(metric: Metric) -> None:
    logits, labels = drawn(8, 5)
    for outputs in (logits.clone().requires_grad_(), logits.bfloat16()):
        state = metric.update(outputs, batch_of(labels))
        assert not any(value.requires_grad for value in state.values())
        assert {value.dtype for value in state.values()} <= {torch.int64, torch.float32}
        assert bit_identical(metric.compute(state), computed(metric, logits, labels))


def test_labels_and_models_that_do_not_fit_are_refused() -> None:
    logits, truth = drawn_several(6, 4)
    single = torch.zeros(6, dtype=torch.int64)
    metric: Metric
    for metric in (TopK(), ConfusionMatrix(4)):
        with pytest.raises(DataError, match=r"\[6, 4\]"):
            metric.update(logits, batch_of(truth))
    for metric in (ConfusionMatrix(3), Auroc(3), MultiLabel(3)):
        with pytest.raises(DataError, match=r"3 classes.*4"):
            metric.update(logits, batch_of(single))
    for metric in (Auroc(4), MultiLabel(4)):
        with pytest.raises(DataError, match=r"4 classes.*\[6, 2\]"):
            metric.update(logits, batch_of(truth[:, :2]))


@pytest.mark.parametrize(
    ("name", "component", "supplied", "wrong"),
    [
        ("top_k", TopK, {}, {"k": [0]}),
        ("confusion_matrix", ConfusionMatrix, {"num_classes": 3}, {"num_classes": 3}),
        ("auroc", Auroc, {"num_classes": 3}, {"num_classes": 3}),
        ("map", MeanAveragePrecision, {"num_classes": 3}, {"num_classes": 3}),
        ("multi_label", MultiLabel, {"num_classes": 3}, {"threshold": 1.0}),
    ],
)
def test_recipes_can_name_the_metrics(
    name: str, component: Any, supplied: dict[str, int], wrong: dict[str, Any]
) -> None:
    entry = register.kind("metric").find(name)
    assert entry is not None
    assert entry.resolve() is component
    component(**supplied, **entry.arguments().model_dump())
    with pytest.raises(ValidationError):
        entry.arguments.model_validate(wrong)
