"""One of several processes, or the only one: evaluates splits of several sizes. Argument: a folder for the figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from small_runs import NormedNet, Small

from paceline.core.mesh import Mesh, join
from paceline.engine.evaluate import evaluate

# Size and batch. Of the last four some processes of three, or of two, have no batch at all.
SPLITS = [(1003, 64), (1003, 256), (130, 64), (70, 64), (5, 4), (1, 4)]


def measure(mesh: Mesh, out: Path, size: int, batch: int) -> dict[str, Any]:
    """Figures to the last bit, the confusion matrix, and how many batches this process kept to draw."""
    small = Small(out, dtype=torch.float32, net=NormedNet, evaluation_size=size, evaluation_batch=batch)
    evaluation = evaluate(small.run(mesh=mesh), "val")
    return {
        "figures": {name: value.hex() for name, value in sorted(evaluation.figures.items())},
        "confusion": evaluation.tables["confusion"].tolist(),
        "num_samples": evaluation.num_samples,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    mesh = join("cpu")
    try:
        found = [measure(mesh, folder, size, batch) for size, batch in SPLITS]
        (folder / f"rank-{mesh.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        mesh.leave()


if __name__ == "__main__":
    main()
