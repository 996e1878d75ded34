"""One of two processes: trains projects of `paceline new` for a few steps, one after the other."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import paceline
from paceline.core.world import join

SHORT: dict[str, Any] = {"train.epochs": None, "train.steps": 3, "data.num_workers": 0, "evaluate.num_workers": 0}


def main(root: Path, tasks: list[str]) -> None:
    world = join("cpu")
    for task in tasks:
        os.chdir(root / task)
        sys.path[0] = str(root / task)
        sys.modules.pop("parts", None)
        importlib.import_module("parts")
        result = paceline.train(paceline.build("recipe.yaml", SHORT))
        assert result.metrics["val"]
    world.barrier()
    world.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo may still let go of tensors while the interpreter is taken down
