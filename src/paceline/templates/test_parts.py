"""Tests of your parts: run `python -m unittest` in this folder; pytest runs them too."""

from __future__ import annotations

import math
import tempfile
import unittest
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


class TestParts(unittest.TestCase):
    """What must hold for your parts."""

    def build(self, **keys: Any) -> Any:
        """A short run of the recipe, in a folder of its own."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return paceline.build(FOLDER / "recipe.yaml", SHORT | keys, Path(folder.name) / "run")

    def test_both_splits_have_samples(self) -> None:
        """A small split often means that files are elsewhere, or named differently."""
        run = self.build()
        assert len(run.train_loader.dataset) > len(run.evaluations["val"].loader.dataset) > 0

    def test_a_run_trains_and_measures(self) -> None:
        """Two steps, an evaluation and a checkpoint, as the recipe says."""
        result = paceline.train(self.build())
        assert math.isfinite(result.metrics["val"]["my_metric"])
        assert result.best is not None

    def test_one_batch_is_learned(self) -> None:
        """If the loss of one batch does not fall, look for the mistake in the model, the loss or the learning rate."""
        run = self.build(**{"train.steps": 8})
        batch = next(iter(run.batches))
        losses = [float(paceline.train_step(run, batch).losses["loss"]) for _ in range(8)]
        assert losses[-1] < losses[0]
