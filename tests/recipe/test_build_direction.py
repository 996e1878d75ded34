"""`checkpoint.best` and `expect` ask the metric which direction is better, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.arguments import Arguments
from paceline.core.errors import RecipeError
from paceline.core.registry import Entry, register
from paceline.data.batch import Batch
from paceline.engine.loop import train
from paceline.engine.run import Run
from paceline.metrics.metric import MetricValues, State
from paceline.recipe.build import build
from paceline.run.summary import expectation_lines

RECIPE: dict[str, Any] = {
    "name": "directed",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4]},
    "data": {
        "batch_size": 8,
        "num_workers": 0,
        "train": {"dataset": "fashion_small", "split": "train"},
        "val": {"dataset": "fashion_small", "split": "test"},
    },
    "losses": ["cross_entropy"],
    "optimizer": {"name": "sgd", "lr": 0.01},
    "train": {"steps": 3, "threads": 1},
    "evaluate": {"metrics": ["drift"], "every_steps": 1, "batch_size": 1000},
    "checkpoint": {"every_steps": 1, "best": "drift"},
    "logging": {"images": False, "tensorboard": False},
}


class Drift:
    """An error of a user's own, which grows with each evaluation."""

    def __init__(self) -> None:
        self.times = 0

    def update(self, predictions: Any, batch: Batch) -> State:
        return {"samples": torch.tensor(batch.size)}

    def compute(self, state: State) -> MetricValues:
        self.times += 1
        return {"drift": float(self.times)}


def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Any = None, **changes: Any) -> Run:
    metrics = register.kind("metric")
    kind = type("Drift", (Drift,), {} if says is None else {"higher_is_better": says})
    monkeypatch.setattr(metrics, "_entries", {**metrics._entries, "drift": Entry("drift", kind, "", lambda: Arguments)})
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
    return build(tmp_path / "recipe.json", changes, tmp_path / "run")


@pytest.mark.parametrize(
    ("says", "best", "is_reached"), [(False, 1, False), (True, 3, True), ({"drift": False}, 1, False)]
)
def test_the_best_checkpoint_and_what_is_expected_go_by_the_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Any, best: int, is_reached: bool
) -> None:
    expect = {"drift": 2.0, "loss": 1000.0, "top1": 0.0}
    run = built(tmp_path, monkeypatch, says, expect=expect)
    train(run)
    assert (run.out / "best").readlink().name == f"step-{best:08d}"
    assert ["NOT reached" not in line for line in expectation_lines(run)] == [is_reached, True, True]


def test_a_metric_that_does_not_say_is_refused_where_its_values_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match=r"checkpoint\.best: .* higher_is_better .* to Drift$"):
        built(tmp_path, monkeypatch)
    with pytest.raises(RecipeError, match=r"expect\.drift: .* higher_is_better .* to Drift$"):
        built(tmp_path, monkeypatch, **{"checkpoint.best": "loss", "expect": {"drift": 1.0}})
    assert built(tmp_path, monkeypatch, **{"checkpoint.best": "loss"}).store.direction == "min"
    assert built(tmp_path, monkeypatch, **{"checkpoint.best": "auto"}).store.direction == "max"
    assert built(tmp_path, monkeypatch, **{"checkpoint.direction": "min"}).store.direction == "min"
    assert not (tmp_path / "run").exists()


def test_what_no_metric_reports_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"drift": False}
    with pytest.raises(RecipeError, match=r'checkpoint\.best: unknown metric "top_1"; did you mean "top1"'):
        built(tmp_path, monkeypatch, named, **{"checkpoint.best": "top_1"})
    with pytest.raises(RecipeError, match=r'expect\.los: unknown metric "los"; did you mean "loss"'):
        built(tmp_path, monkeypatch, named, expect={"los": 0.5})
