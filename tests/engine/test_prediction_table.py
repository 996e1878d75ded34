"""Predicted classes as a table: a row for each sample, names as they are, one label or several."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import NamedFiles, Small, images

from paceline.core.errors import DataError
from paceline.data.batch import Batch, Sample
from paceline.data.skip_list import SkipList
from paceline.data.split_loader import SplitLoader
from paceline.engine.evaluate import evaluate
from paceline.engine.predictions import PredictionTable
from paceline.engine.run import EvaluationSet
from paceline.losses.classification import CrossEntropy
from paceline.metrics.metric import merge_states
from paceline.tasks.classification import Classification
from paceline.tasks.video import VideoClassification

CLASSES = ["cat", "dog, small", "Käfer"]


def task(multi_label: bool = False, kind: type[Classification] = Classification) -> Classification:
    return kind({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, CLASSES, multi_label=multi_label)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, chosen: Classification, *measured: tuple[torch.Tensor, Batch]) -> list[dict[str, str]]:
    """The rows of a split whose batches come in this order."""
    table = PredictionTable(path, NamedFiles("a.jpg", "b.jpg", "c.jpg", "\udcff.jpg"), chosen)
    (metric,) = table.metrics
    table.finish([merge_states(metric.update(*each) for each in measured)])
    return rows(path)


def test_names_are_no_formulas_and_labels_that_are_numbers_stay(tmp_path: Path) -> None:
    class Relative(NamedFiles):
        def path(self, index: int) -> Path:
            return Path(self._names[index])

    chosen = Classification({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, ["-1", "=1+1"])
    table = PredictionTable(tmp_path / "val.csv", Relative("@a.jpg", "-b/c.jpg"), chosen)
    (metric,) = table.metrics
    batch = Batch(id=torch.arange(2), label=torch.tensor([0, 1]))
    table.finish([merge_states([metric.update(torch.tensor([[1.0, 1.0], [0.0, 1.0]]), batch)])])
    found = rows(tmp_path / "val.csv")
    assert list(found[0])[-2:] == ["-1", "'=1+1"]
    written = [[row[name] for name in ("path", "label", "predicted", "probability")] for row in found]
    assert written == [["'@a.jpg", "-1", "-1", "0.5"], ["'-b/c.jpg", "'=1+1", "'=1+1", "0.731059"]]


def test_a_row_for_each_sample(tmp_path: Path) -> None:
    logits = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.0, 1.0], [0.6, 0.4, 0.0]]).log()
    nothing = torch.full((1, 3), torch.nan)
    first = Batch(id=torch.tensor([0, 1]), label=torch.tensor([1, 0]))
    second = Batch(id=torch.tensor([3]), label=torch.tensor([0]))
    third = Batch(id=torch.tensor([2]), label=torch.tensor([2]))
    found = write(tmp_path / "in" / "val.csv", task(), (logits[:2], first), (nothing, third), (logits[2:], second))
    assert list(found[0]) == ["sample", "path", "label", "predicted", "probability", *CLASSES]
    assert [list(row.values()) for row in found] == [
        ["0", "/set/images/a.jpg", "dog, small", "dog, small", "0.5", "0.25", "0.5", "0.25"],
        ["1", "/set/images/b.jpg", "cat", "Käfer", "1", "0", "0", "1"],
        ["2", "/set/images/c.jpg", "Käfer", "", "", "nan", "nan", "nan"],
        ["3", "/set/images/\\udcff.jpg", "cat", "cat", "0.6", "0.6", "0.4", "0"],
    ]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["val.csv"]


def test_several_labels(tmp_path: Path) -> None:
    logits = torch.tensor([[0.75, 0.2, 0.9], [0.5, 0.1, 0.2]]).double().logit()
    samples = Batch(id=torch.tensor([0, 1]), label=torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    found = write(tmp_path / "val.csv", task(multi_label=True), (logits, samples))
    assert [list(row.values())[2:] for row in found] == [
        ["cat|dog, small", "cat|Käfer", "0.75|0.9", "0.75", "0.2", "0.9"],
        ["", "", "", "0.5", "0.1", "0.2"],
    ]


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_video_has_one_row_wherever_its_clips_came(multi_label: bool, tmp_path: Path) -> None:
    chosen = task(multi_label, VideoClassification)
    logits = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0))  # [videos, clips, classes]
    shares = (logits.double().sigmoid() if multi_label else logits.double().softmax(2)).mean(1)
    labels = torch.eye(3)[:2] if multi_label else torch.tensor([0, 1])

    def clips(*ids: int) -> tuple[torch.Tensor, Batch]:
        numbers = torch.tensor(ids)
        return logits.flatten(0, 1)[numbers], Batch(id=numbers, video=numbers // 2, label=labels[numbers // 2])

    apart = write(tmp_path / "apart.csv", chosen, clips(0, 1, 2), clips(3))
    views = write(tmp_path / "views.csv", chosen, (logits, Batch(id=torch.tensor([0, 1]), label=labels)))
    assert [row["path"] for row in apart] == ["/set/images/a.jpg", "/set/images/c.jpg"]
    for row, view, share, name in zip(apart, views, shares.tolist(), CLASSES, strict=False):
        assert row | {"path": view["path"]} == view
        assert [float(row[each]) for each in CLASSES] == pytest.approx(share, rel=1e-5)
        assert row["label"] == name
    once = write(tmp_path / "once.csv", chosen, (logits[:, 0], Batch(id=torch.tensor([0, 1]), label=labels)))
    assert [row["sample"] for row in once] == ["0", "1"]


def test_a_table_is_that_of_the_last_evaluation(tmp_path: Path) -> None:
    run = Small(tmp_path, evaluation_size=37).run(save_predictions=True)
    metrics = evaluate(run, "val").metrics
    found = rows(tmp_path / "predictions" / "val.csv")
    assert [row["sample"] for row in found] == [str(number) for number in range(37)]
    assert "path" not in found[0]
    assert [row["label"] for row in found] == [f"class {label}" for label in images(37).fields["label"].tolist()]
    assert sum(row["label"] == row["predicted"] for row in found) / 37 == metrics["top1"]
    with torch.no_grad():
        next(run.model.parameters()).add_(1)
    evaluate(run, "val")
    assert rows(tmp_path / "predictions" / "val.csv") != found


class Damaged:
    """Images of which two cannot be read: one beside others in its batch, and a whole batch."""

    classes = ["class 0", "class 1", "class 2"]
    channels = 2

    def __len__(self) -> int:
        return 5

    def read(self, index: int) -> Sample:
        if index in (1, 4):
            raise DataError("damaged")
        return {"image": np.full((6, 6, 2), index, np.uint8), "label": index % 3}


def test_what_cannot_be_read_has_no_row_and_is_not_drawn(tmp_path: Path) -> None:
    examined = EvaluationSet(SplitLoader(Damaged(), [], 0, SkipList("val", 2)), batch_size=2, num_workers=0, threads=1)
    small = Small(tmp_path, dtype=torch.float32)
    evaluation = evaluate(small.run(save_predictions=True, visualize=True, evaluations={"val": examined}), "val")
    assert [row["sample"] for row in rows(tmp_path / "predictions" / "val.csv")] == ["0", "2", "3"]
    assert evaluation.num_skipped == 2
    assert list(evaluation.drawn.panels) == [0, 2, 3]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "predictions").touch()
    evaluation = evaluate(Small(tmp_path, evaluation_size=3).run(save_predictions=True), "val")
    assert evaluation.problem
    assert "predictions/val.csv: the prediction cannot be written (" in evaluation.problem
    assert evaluation.num_samples == 3


def test_of_many_classes_only_the_likeliest_is_kept(tmp_path: Path) -> None:
    classes = [f"class {number}" for number in range(101)]
    chosen = Classification({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, classes)
    logits = torch.zeros(2, 101)
    logits[0, 7], logits[1, 3] = 20.0, torch.nan
    labels = Batch(id=torch.tensor([0, 1]), label=torch.tensor([7, 100]))
    assert write(tmp_path / "val.csv", chosen, (logits, labels)) == [
        {"sample": "0", "path": "/set/images/a.jpg", "label": "class 7", "predicted": "class 7", "probability": "1"},
        {"sample": "1", "path": "/set/images/b.jpg", "label": "class 100", "predicted": "", "probability": ""},
    ]
