"""Splits of awkward sizes: metrics to the last bit, predictions and images, for one process and for several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_runs import CLASSES, NormedNet, Small
from torch import Tensor

from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.engine.evaluate import evaluate
from paceline.engine.visualizer import visualize_evaluation
from paceline.losses.classification import CrossEntropy
from paceline.tasks.classification import Classification
from paceline.visualize.grid import Panel, class_legend

# Size and batch. Of the last four some processes of three, or of two, have no batch at all.
SPLITS = [(1003, 64), (1003, 256), (130, 64), (70, 64), (5, 4), (1, 4)]


def measure_all(world: World, out: Path) -> list[dict[str, Any]]:
    """What each split comes to; its predictions are written into a folder of `out`."""
    return [_measure(world, out / f"{size}-{batch}", size, batch) for size, batch in SPLITS]


def tables(out: Path) -> list[bytes]:
    """The predictions of each split, as they were written."""
    return [(out / f"{size}-{batch}" / "predictions" / "val.csv").read_bytes() for size, batch in SPLITS]


def written_images(out: Path) -> list[dict[str, bytes]]:
    """The image files of each split, and those of its worst samples with their list, by name."""
    folders = [out / f"{size}-{batch}" for size, batch in SPLITS]
    return [
        {path.name: path.read_bytes() for name in ("images", "worst") for path in sorted((folder / name).iterdir())}
        for folder in folders
    ]


class WithLegend(Classification):
    """Says in a legend what it predicts, and in captions which sample it is."""

    def draw(self, batch: Batch, predictions: Tensor | None, index: int) -> list[Panel]:
        assert predictions is not None
        (panel,) = super().draw(batch, predictions, index)
        legend = class_legend(predictions[index].argmax(), self.classes)
        return [panel._replace(caption=f"{batch.ids[index]}: {panel.caption}", legend=legend)]


def _measure(world: World, out: Path, size: int, batch: int) -> dict[str, Any]:
    small = Small(out, dtype=torch.float32, net=NormedNet, evaluation_size=size, evaluation_batch=batch)
    task = WithLegend({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, CLASSES, top_k=(1,))
    run = small.run(world=world, save_predictions=True, visualize=True, task=task)
    evaluation = evaluate(run, "val")
    visualize_evaluation(run, evaluation.split, evaluation.tables, evaluation.drawn)
    return {
        "captions": {sample: panel.caption for sample, (panel,) in evaluation.drawn.panels.items()},
        "metrics": {name: value.hex() for name, value in sorted(evaluation.metrics.items())},
        "confusion": evaluation.tables["confusion"].tolist(),
        "num_samples": evaluation.num_samples,
    }
