"""The worst samples of an evaluation: exact, in one order, drawn and written; their errors task by task."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import ALONE, CLASSES, NamedFiles, Small
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.engine.evaluate import evaluate
from paceline.engine.loop import log_evaluation
from paceline.engine.visualizer import NUM_WORST, Ranking, WorstSample, write_worst
from paceline.loggers.events import LoggerGroup, Note
from paceline.losses.classification import CrossEntropy
from paceline.tasks.classification import Classification
from paceline.tasks.task import Task
from paceline.visualize.grid import Panel


class Measured:
    """A task whose predictions are errors."""

    def sample_errors(self, predictions: Tensor, batch: Batch) -> Tensor:
        return predictions


def rank(errors: list[float], batch_size: int, order: list[int] | None = None) -> dict[int, float]:
    ranking, values = Ranking(Measured()), torch.tensor(errors)
    batches = torch.split(torch.arange(len(errors)), batch_size)
    for number in order or range(len(batches)):
        ranking.add(Batch(id=batches[number]), values[batches[number]])
    return ranking.gather(ALONE)


def test_the_greatest_errors_are_ranked_and_equal_ones_by_id() -> None:
    errors = [float(number % 7) for number in range(100)]
    expected = sorted(range(100), key=lambda sample: (-errors[sample], sample))[:NUM_WORST]
    found = rank(errors, 9)
    assert list(found) == expected
    assert list(found.values()) == [errors[sample] for sample in expected]
    assert rank(errors, 9, [*range(11, -1, -1)]) == found
    assert list(rank(errors, 9, [*range(11, -1, -1)])) == expected
    assert rank(errors, 100) == found


def test_errors_that_are_not_finite_come_first() -> None:
    assert list(rank([1.0, math.nan, -math.inf, math.inf], 4)) == [1, 3, 0, 2]


def test_a_task_without_errors_ranks_nothing() -> None:
    ranking = Ranking(object())
    assert ranking.add(Batch(id=torch.arange(3)), None) == set()
    assert ranking.gather(ALONE) == {}


def test_the_files_say_which_samples_they_are(tmp_path: Path) -> None:
    white = np.full((20, 30, 3), 255, np.uint8)
    worst = [WorstSample(1, 0.5, [Panel(white, "cat, not dog", False)]), WorstSample(0, math.inf, [])]
    write_worst(tmp_path, "val", {"step": 3, "error": "cross-entropy"}, worst, NamedFiles("a.jpg", "b.jpg"))
    first = {
        "sample": 1,
        "path": "/set/images/b.jpg",
        "error": 0.5,
        "captions": ["cat, not dog"],
        "image": "val-01.png",
    }
    second = {"sample": 0, "path": "/set/images/a.jpg", "error": None, "captions": [], "image": None}
    content = {"step": 3, "error": "cross-entropy", "samples": [first, second]}
    assert json.loads((tmp_path / "val.json").read_text()) == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["val-01.png", "val.json"]


def test_an_evaluation_writes_those_that_a_pass_over_all_samples_finds(tmp_path: Path) -> None:
    run = Small(tmp_path, evaluation_size=100).run(visualize=True)
    log_evaluation(run, evaluate(run, "val"))
    found = json.loads((tmp_path / "worst" / "val.json").read_text())
    data: Any = run.evaluations["val"].loader.dataset
    samples = [data.read(index) for index in range(100)]
    images = torch.stack([torch.as_tensor(np.moveaxis(np.asarray(each["image"]), -1, 0)) for each in samples])
    labels = torch.tensor([int(each["label"]) for each in samples])
    run.model.eval()
    losses = nn.functional.cross_entropy(run.model(images), labels, reduction="none")
    expected = losses.topk(NUM_WORST)
    assert [each["sample"] for each in found["samples"]] == expected.indices.tolist()
    assert [each["error"] for each in found["samples"]] == pytest.approx(expected.values.tolist())
    assert {(tmp_path / "worst" / each["image"]).is_file() for each in found["samples"]} == {True}
    assert (found["step"], found["error"]) == (0, "cross-entropy")


class Own(Task):
    """A user's: it knows no errors of samples."""

    def __init__(self) -> None:
        super().__init__({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, CLASSES)


class Wrong(Classification):
    """Gives one number for all."""

    def __init__(self) -> None:
        super().__init__({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, CLASSES, top_k=(1,))

    def sample_errors(self, predictions: Tensor, batch: Batch) -> Tensor:
        return super().sample_errors(predictions, batch).sum()


def test_without_errors_nothing_is_written_and_wrong_ones_are_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []

    class Warnings(LoggerGroup):
        def emit(self, event: Any) -> None:
            warnings.extend([event.text] if isinstance(event, Note) else [])

    for task in (Own(), Wrong()):
        run = Small(tmp_path, evaluation_size=20).run(visualize=True, task=task, logger=Warnings())
        log_evaluation(run, evaluate(run, "val"))
        assert not (tmp_path / "worst").exists()
    (warning,) = warnings
    assert "sample_errors gave [], expected a tensor of 16 numbers" in warning or "of 4 numbers" in warning


def test_no_images_no_worst_samples(tmp_path: Path) -> None:
    run = Small(tmp_path, evaluation_size=20).run()
    log_evaluation(run, evaluate(run, "val"))
    assert not (tmp_path / "worst").exists()
