"""Metrics of training batches: of the whole step on any number of micro-batches, and never read step by step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import CLASSES, NUM_CLASSES, PlainNet, Small, one_thread  # noqa: F401
from torch import Tensor

from paceline.data.batch import Batch
from paceline.engine.loss_accumulator import Columns, Value, read, read_columns
from paceline.engine.step import forward, start_losses, train_step
from paceline.losses.classification import BinaryCrossEntropy, CrossEntropy
from paceline.losses.loss_term import LossTerm
from paceline.losses.pixel import PixelBinaryCrossEntropy, PixelCrossEntropy
from paceline.tasks.classification import Classification
from paceline.tasks.saliency import Saliency
from paceline.tasks.segmentation import Segmentation

pytestmark = pytest.mark.usefixtures("one_thread")


def classification(**arguments: Any) -> Classification:
    return Classification({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, CLASSES, **arguments)


@pytest.mark.parametrize("micro_batch_size", [64, 13, 1])
def test_they_are_those_of_the_global_batch(micro_batch_size: int, tmp_path: Path) -> None:
    run = Small(tmp_path, micro_batch_size=micro_batch_size).run(task=classification(top_k=(1, 2)))
    step_batch = next(iter(run.batches))
    whole = torch.cat([micro.batch["image"] for micro in step_batch.micro_batches])
    labels = torch.cat([micro.batch["label"] for micro in step_batch.micro_batches])
    with torch.no_grad():
        best = run.model(whole).topk(2).indices
    found = first_of(read([train_step(run, step_batch).accumulator], run.world))
    assert found["top1"] == (best[:, 0] == labels).sum().item() / 64
    assert found["top2"] == (best == labels[:, None]).any(1).sum().item() / 64
    assert 0 < found["top1"] < found["top2"] < 1


def first_of(columns: Columns) -> dict[str, float]:
    return {name: column[0] for name, column in columns.items()}


class Forgetful(Classification):
    """As a user's own that was written before there were any."""

    def losses(self, model: Any, batch: Batch) -> dict[str, LossTerm]:
        return {name: loss(model(batch["image"]), batch) for name, loss in self.loss_functions.items()}


def test_a_task_that_gives_none_logs_none(tmp_path: Path) -> None:
    task = Forgetful({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, CLASSES)
    run = Small(tmp_path).run(task=task)
    found = first_of(read([train_step(run, next(iter(run.batches))).accumulator], run.world))
    assert {name for name, value in found.items() if math.isfinite(value)} == {"loss", "cross_entropy"}


def test_a_loss_of_the_same_name_stays_a_loss(tmp_path: Path) -> None:
    run = Small(tmp_path).run(task=Classification({"top1": CrossEntropy()}, {"top1": 2.0}, CLASSES, top_k=(1,)))
    step_batch = next(iter(run.batches))
    accumulator = start_losses(run, step_batch)
    for micro in step_batch.micro_batches:
        terms = forward(run, micro)
        accumulator.to_backward(terms, micro)
        accumulator.add(terms, micro)
    found = first_of(read([accumulator], run.world))
    assert found["loss"] == 2 * found["top1"]
    assert found["top1"] > 1  # a share is not


def share(term: LossTerm) -> float:
    return float(term.numerator) / float(term.denominator)


def test_logits_that_are_no_numbers_are_never_right_and_mixed_labels_count_by_the_larger() -> None:
    logits = torch.tensor([[0.0, 1, 2], [torch.nan] * 3, [5, 1, 2], [0, 3, 1]])
    task = classification(top_k=(1, 2))
    found = task.training_terms(logits, Batch(label=torch.tensor([2, 0, 2, 1])))
    assert [share(found[name]) for name in ("top1", "top2")] == [0.5, 0.75]
    mixed = torch.tensor([[0.4, 0, 0.6], [1, 0, 0], [0.3, 0, 0.7], [0, 1, 0]])
    assert share(task.training_terms(logits, Batch(label=mixed))["top1"]) == 0.5


def test_several_labels() -> None:
    task = Classification({"bce": BinaryCrossEntropy()}, {"bce": 1.0}, CLASSES, multi_label=True)
    labels = torch.tensor([[1, 0, 1], [0, 0, 1]])
    logits = torch.tensor([[2.0, -1, -3], [1, -1, 4]])
    assert share(task.training_terms(logits, Batch(label=labels))["accuracy"]) == pytest.approx(4 / 6)


def test_pixels() -> None:
    masks = torch.tensor([[[0, 1], [255, 2]]])
    logits = torch.zeros(1, NUM_CLASSES, 2, 2)
    logits[0, 1] = 1  # every pixel is said to be of class 1
    segmentation = Segmentation({"ce": PixelCrossEntropy(NUM_CLASSES)}, {"ce": 1.0}, CLASSES, ignore_index=255)
    assert share(segmentation.training_terms(logits, Batch(mask=masks))["pixel_accuracy"]) == pytest.approx(1 / 3)
    saliency = Saliency({"bce": PixelBinaryCrossEntropy()}, {"bce": 1.0}, ["foreground"])
    maps: Tensor = torch.zeros(1, 1, 2, 2)  # sigmoid: 0.5
    truth = torch.tensor([[[0, 255], [255, 51]]])
    assert share(saliency.training_terms(maps, Batch(mask=truth))["mae"]) == pytest.approx((0.5 * 3 + 0.3) / 4)


def test_nets_of_any_precision(tmp_path: Path) -> None:
    """Losses are float64 here and shares are not: they are read together all the same."""
    small = Small(tmp_path, net=PlainNet)
    for each in (small, replace(small, dtype=torch.float32)):
        run = each.run()
        assert 0 <= read([train_step(run, next(iter(run.batches))).accumulator], run.world)["top1"][0] <= 1


class WithGradient(Classification):
    """A task whose metric is made of outputs, and not detached."""

    def training_terms(self, outputs: Tensor, batch: Batch) -> dict[str, LossTerm]:
        return {"top1": LossTerm(outputs.square().sum(), float(len(outputs)))}


class Extended(Classification):
    """A task with a metric beside those it inherits."""

    def training_terms(self, outputs: Tensor, batch: Batch) -> dict[str, LossTerm]:
        return {"mine": LossTerm(outputs.detach().sum(), 2.0), **super().training_terms(outputs, batch)}


@pytest.mark.parametrize("num_classes", [NUM_CLASSES, 5000])
def test_a_task_may_have_further_metrics(num_classes: int) -> None:
    task = Extended({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, ["a"] * num_classes, top_k=(1, 2))
    task.training_metrics = ["mine", *task.training_metrics]
    outputs = torch.zeros(2, num_classes)
    outputs[:, :2] = torch.tensor([[1, 2], [2, 1]])
    found = task.training_terms(outputs, Batch(label=torch.tensor([1, 1])))
    assert {name: share(term) for name, term in found.items()} == {"mine": 3.0, "top1": 0.5, "top2": 1.0}


def test_a_metric_that_has_a_gradient_keeps_no_graph(tmp_path: Path) -> None:
    task = WithGradient({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, CLASSES, top_k=(1,))
    run = Small(tmp_path).run(task=task)
    result = train_step(run, next(iter(run.batches)))
    assert all(isinstance(value, float) for _, values in result.accumulator.parts for value in values)
    assert read([result.accumulator], run.world)["top1"][0] > 0


def test_numbers_of_every_kind_are_read_in_their_places() -> None:
    values: list[Value] = [0.1, torch.tensor(0.5, dtype=torch.float64), torch.tensor(3), torch.tensor(0.25), 2.0]
    assert read_columns([values, values[::-1], []]) == [[0.1, 0.5, 3.0, 0.25, 2.0], [2.0, 0.25, 3.0, 0.5, 0.1], []]


def test_a_rank_without_a_micro_batch_adds_nothing(tmp_path: Path) -> None:
    run = Small(tmp_path).run()
    step_batch = next(iter(run.batches))
    for micro in step_batch.micro_batches:
        micro.is_padding = True
    accumulator = train_step(run, step_batch).accumulator
    assert accumulator.parts == []
    found = read([accumulator, accumulator], run.world)
    assert found.pop("loss") == found.pop("cross_entropy") == [0.0, 0.0]
    assert all(math.isnan(value) for column in found.values() for value in column)
