"""Classification as the engine sees it: counts, losses, predictions, metrics and images."""

import pytest
import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.losses.classification import BinaryCrossEntropy, CrossEntropy
from paceline.losses.loss_term import Loss
from paceline.metrics.classification import ConfusionMatrix
from paceline.metrics.metric import MetricValues, State, merge_states
from paceline.tasks.classification import Classification

CLASSES = ["cat", "dog", "eel"]


def task(
    losses: dict[str, Loss] | None = None,
    classes: list[str] = CLASSES,
    top_k: tuple[int, ...] = (1, 2),
    multi_label: bool = False,
) -> Classification:
    chosen = losses or {"cross_entropy": CrossEntropy()}
    return Classification(chosen, dict.fromkeys(chosen, 1.0), classes, top_k=top_k, multi_label=multi_label)


def batch(size: int = 6, channels: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, channels, 4, 5, generator=generator)
    return Batch(id=torch.arange(size), image=images, label=torch.arange(size) % 3)


def metrics_of(chosen: Classification, predictions: Tensor, samples: Batch) -> MetricValues:
    """The metrics, with the samples measured in two batches."""
    found: MetricValues = {}
    for metric in chosen.metrics():
        states: list[State] = []
        for part in (slice(0, 4), slice(4, None)):
            cut = Batch({name: value[part] for name, value in samples.items()})
            states.append(metric.update(predictions[part], cut))
        found |= metric.compute(merge_states(states))
    return found


def test_counts_are_known_before_the_model_is_asked() -> None:
    both = task({"cross_entropy": CrossEntropy(class_weights=[1.0, 0.5, 0.25]), "bce": BinaryCrossEntropy()})
    assert both.counts(batch(6)) == {"cross_entropy": 3.5, "bce": 6.0}


def test_losses_are_fractions_of_the_logits() -> None:
    both = task({"cross_entropy": CrossEntropy(), "bce": BinaryCrossEntropy()})
    model, samples = nn.Sequential(nn.Flatten(), nn.Linear(60, 3)), batch(6)
    logits, labels = model(samples["image"]), samples["label"]
    terms = both.losses(model, samples)
    assert set(terms) == {*both.weights, *both.training_metrics}
    means = {name: (terms[name].numerator / terms[name].denominator).item() for name in both.weights}
    truth = nn.functional.one_hot(labels, 3).float()
    assert means == pytest.approx(
        {
            "cross_entropy": nn.functional.cross_entropy(logits, labels).item(),
            "bce": nn.functional.binary_cross_entropy_with_logits(logits, truth).item(),
        },
        rel=1e-6,
    )
    assert both.counts(samples) == {name: terms[name].denominator for name in both.weights}
    assert torch.equal(both.predict(model, samples), logits)


def test_the_model_is_asked_once_for_all_losses() -> None:
    calls = []

    class Model(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            calls.append(len(images))
            return images.flatten(1)[:, :3]

    task({"cross_entropy": CrossEntropy(), "bce": BinaryCrossEntropy()}).losses(Model(), batch(6))
    assert calls == [6]


def test_metrics_of_one_label_per_image() -> None:
    # Right, wrong but second, right, right, wrong and last, wrong but second.
    logits = torch.tensor([[3.0, 1, 0], [2, 1, 0], [0, 1, 2], [1, 0, 0], [1, -1, 0], [2, 0, 1]])
    found = metrics_of(task(), logits, batch(6))
    assert found["top1"] == 3 / 6
    assert found["top2"] == 5 / 6
    assert found["confusion"].tolist() == [[2, 0, 0], [2, 0, 0], [1, 0, 1]]
    assert found["recall"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert found["precision"] == pytest.approx((2 / 5 + 0 + 1) / 3)
    expected = nn.functional.cross_entropy(logits.double(), batch(6)["label"]).item()
    assert found["cross_entropy"] == found["loss"] == pytest.approx(expected, rel=1e-6)
    assert 0 <= found["auroc"] <= 1


def test_metrics_of_several_labels_per_image() -> None:
    samples = batch(6)
    samples["label"] = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 0, 1]])
    chosen = task({"bce": BinaryCrossEntropy()}, multi_label=True)
    logits = (samples["label"] * 2.0 - 1.0).clone()
    perfect = metrics_of(chosen, logits, samples)
    assert perfect["f1"] == perfect["exact_match"] == perfect["auroc"] == perfect["map"] == 1
    logits[0, 0] *= -1
    assert metrics_of(chosen, logits, samples)["exact_match"] == 5 / 6


@pytest.mark.parametrize(("top_k", "multi_label"), [((1, 2), False), ((2,), False), ((1,), True)])
def test_the_main_metric_is_among_the_metrics(top_k: tuple[int, ...], multi_label: bool) -> None:
    samples = batch(6)
    losses: dict[str, Loss] = {"cross_entropy": CrossEntropy()}
    if multi_label:
        losses = {"bce": BinaryCrossEntropy()}
        samples["label"] = nn.functional.one_hot(samples["label"], 3)
    chosen = task(losses, top_k=top_k, multi_label=multi_label)
    assert chosen.main_metric in metrics_of(chosen, torch.randn(6, 3), samples)


def test_further_metrics_come_last() -> None:
    extra = ConfusionMatrix(3)
    chosen = Classification({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, CLASSES, [extra])
    assert chosen.metrics()[-1] is extra


def test_with_many_classes_the_scores_of_all_samples_are_not_kept() -> None:
    names = {len(found.metrics()) for found in (task(classes=[str(n) for n in range(count)]) for count in (100, 101))}
    assert names == {3, 4}


def test_right_and_wrong_predictions_are_distinguished() -> None:
    samples = batch(3)
    right = nn.functional.one_hot(samples["label"], 3).float()
    correct, wrong, alone = (task().draw(samples, logits, 1) for logits in (right, right.roll(1, 1), None))
    assert [panel.caption for (panel,) in (correct, wrong, alone)] == ["dog", "eel, not dog", "dog"]
    assert [panel.is_correct for (panel,) in (correct, wrong, alone)] == [True, False, None]
    assert {panel.image.shape for (panel,) in (correct, wrong, alone)} == {(76, 95, 3)}


def test_mixed_samples_have_the_label_of_their_largest_share() -> None:
    samples = Batch(batch(2), label=torch.tensor([[0.2, 0.1, 0.7], [0.6, 0.4, 0.0]]))
    assert [task().draw(samples, None, index)[0].caption for index in range(2)] == ["eel", "cat"]


def test_the_confusion_matrix_is_drawn_if_there_is_one() -> None:
    images = task().draw_metrics({"confusion": torch.tensor([[2, 0, 0], [2, 0, 0], [1, 0, 1]])})
    assert list(images) == ["confusion"]
    assert images["confusion"].shape[2] == 3
    assert task().draw_metrics({}) == {}
