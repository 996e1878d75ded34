"""Processes that find different checkpoints in their place: all take that of the first, to measure and to go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.forkserver import paceline, paceline_apart

RECIPE: dict[str, Any] = {
    "name": "followed",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4]},
    "data": {
        "batch_size": 16,
        "train": {"dataset": "fashion_small", "split": "train"},
        "val": {"dataset": "fashion_small", "split": "test"},
    },
    "losses": ["cross_entropy"],
    "optimizer": {"name": "adamw", "lr": 0.01},
    "train": {"steps": 6, "micro_batch_size": 8, "reproducible": "world"},
    "evaluate": {"every_steps": 100},
    "checkpoint": {"every_steps": 2, "keep_last": 9},
    "logging": {"images": False, "tensorboard": False},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """In that of the first process the newest checkpoint is of step 4, in that of the second of step 2."""
    folder = tmp_path_factory.mktemp("followed")
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    whole = paceline(folder, "train", "recipe.json", "--out", "run")
    assert whole.returncode == 0, whole.stderr
    found = [folder / str(rank) for rank in range(2)]
    for rank, newest in enumerate((4, 2)):
        shutil.copytree(folder / "run", found[rank] / "run", symlinks=True)
        shutil.copy(folder / "recipe.json", found[rank])
        (found[rank] / "run/best").unlink()
        for path in (found[rank] / "run/checkpoints").glob("step-*"):
            if int(path.name[5:]) > newest:
                shutil.rmtree(path)
    return found


def test_one_checkpoint_is_measured(folders: list[Path]) -> None:
    alone = json.loads(paceline(folders[0], "eval", "run", "--json").stdout)
    done = paceline_apart(folders, "eval", "run", "--json")
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    shared = json.loads(done[0].stdout)
    assert (shared["step"], shared["metrics"]) == (4, alone["metrics"])


def test_all_go_on_from_one_step(folders: list[Path]) -> None:
    done = paceline_apart(folders, "train", "recipe.json", "--out", "run")
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    last = "run/checkpoints/step-00000006/model.safetensors"
    assert (folders[0] / last).read_bytes() == (folders[0].parent / last).read_bytes()
