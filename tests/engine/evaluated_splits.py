"""Splits of awkward sizes: figures to the last bit, predictions and what is drawn, for one process and for several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from small_runs import NormedNet, Small

from paceline.core.mesh import Mesh
from paceline.engine.evaluate import evaluate

# Size and batch. Of the last four some processes of three, or of two, have no batch at all.
SPLITS = [(1003, 64), (1003, 256), (130, 64), (70, 64), (5, 4), (1, 4)]


def measure_all(mesh: Mesh, out: Path) -> list[dict[str, Any]]:
    """What each split comes to; its predictions are written into a folder of `out`."""
    return [_measure(mesh, out / f"{size}-{batch}", size, batch) for size, batch in SPLITS]


def tables(out: Path) -> list[bytes]:
    """The predictions of each split, as they were written."""
    return [(out / f"{size}-{batch}" / "predictions" / "val.csv").read_bytes() for size, batch in SPLITS]


def pictured(out: Path) -> list[dict[str, Any]]:
    """The samples of each split that would be drawn."""
    found = [load_file(out / f"{size}-{batch}" / "pictured") for size, batch in SPLITS]
    return [{name: tensor.tolist() for name, tensor in each.items()} for each in found]


def _measure(mesh: Mesh, out: Path, size: int, batch: int) -> dict[str, Any]:
    small = Small(out, dtype=torch.float32, net=NormedNet, evaluation_size=size, evaluation_batch=batch)
    evaluation = evaluate(small.run(mesh=mesh, save_predictions=True, pictures=True), "val")
    if mesh.is_main:
        assert evaluation.pictured is not None
        samples, predictions = evaluation.pictured
        save_file({**samples, "predictions": predictions}, out / "pictured")
    return {
        "figures": {name: value.hex() for name, value in sorted(evaluation.figures.items())},
        "confusion": evaluation.tables["confusion"].tolist(),
        "num_samples": evaluation.num_samples,
    }
