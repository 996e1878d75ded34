"""Tests of your parts: run `pytest` in this folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import parts  # noqa: F401  (it registers what the recipe names)

import paceline

FOLDER = Path(__file__).resolve().parent
SHORT: dict[str, Any] = {
    "train.epochs": None,
    "train.steps": 2,
    "data.num_workers": 0,
    "evaluate.num_workers": 0,
}


def build(out: Path, **keys: Any) -> Any:
    """A short run of the recipe."""
    return paceline.build(FOLDER / "recipe.yaml", SHORT | keys, out)


def test_both_splits_have_samples(tmp_path: Path) -> None:
    """A small split often means that files are elsewhere, or named differently."""
    run = build(tmp_path / "run")
    assert len(run.train_loader.dataset) > len(run.evaluations["val"].loader.dataset) > 0


def test_a_run_trains_and_measures(tmp_path: Path) -> None:
    """Two steps, an evaluation and a checkpoint, as the recipe says."""
    result = paceline.train(build(tmp_path / "run"))
    assert math.isfinite(result.metrics["val"]["my_metric"])
    assert result.best is not None


def test_one_batch_is_learned(tmp_path: Path) -> None:
    """If the loss of one batch does not fall, look for the mistake in the model, the loss or the learning rate."""
    run = build(tmp_path / "run", **{"train.steps": 8})
    batch = next(iter(run.batches))
    losses = [float(paceline.train_step(run, batch).losses["loss"]) for _ in range(8)]
    assert losses[-1] < losses[0]
