"""Splits of awkward sizes and their figures to the last bit, for one process and for one of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_runs import NormedNet, Small

from paceline.core.mesh import Mesh
from paceline.engine.evaluate import evaluate

# Size and batch. Of the last four some processes of three, or of two, have no batch at all.
SPLITS = [(1003, 64), (1003, 256), (130, 64), (70, 64), (5, 4), (1, 4)]


def measure_all(mesh: Mesh, out: Path) -> list[dict[str, Any]]:
    """What each split comes to."""
    return [_measure(mesh, out, size, batch) for size, batch in SPLITS]


def _measure(mesh: Mesh, out: Path, size: int, batch: int) -> dict[str, Any]:
    small = Small(out, dtype=torch.float32, net=NormedNet, evaluation_size=size, evaluation_batch=batch)
    evaluation = evaluate(small.run(mesh=mesh), "val")
    return {
        "figures": {name: value.hex() for name, value in sorted(evaluation.figures.items())},
        "confusion": evaluation.tables["confusion"].tolist(),
        "num_samples": evaluation.num_samples,
    }
