"""The same recipe on one process and on several: real commands, real processes, bits compared."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from support.forkserver import paceline_ranks

NET = """
from torch import nn
from paceline.core.registry import register

@register.model("shaken")
def shaken(num_classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(8, 12, 3, stride=2), nn.BatchNorm2d(12, momentum=None), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(48, num_classes),
    )
"""
RECIPE = {
    "name": "shared",
    "task": "classification",
    "model": {"name": "shaken"},
    "data": {
        "batch_size": 50,
        "train": {"dataset": "fashion_small", "split": "train", "transforms": [{"name": "random_horizontal_flip"}]},
        "val": {"dataset": "fashion_small", "split": "test"},
        "test": {
            "plain": {"dataset": "fashion_small", "split": "test"},
            "cut": {"dataset": "fashion_small", "split": "test", "transforms": [{"name": "center_crop", "size": 20}]},
        },
    },
    "losses": [{"name": "cross_entropy", "label_smoothing": 0.1}],
    "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.05},
    "train": {"steps": 30, "micro_batch_size": 13, "clip_grad_norm": 1.0, "averaging": {"name": "ema", "decay": 0.9}},
    "evaluate": {"every_steps": 30, "batch_size": 300},
    "checkpoint": {"every_steps": 10, "keep_last": 9},
    "logging": {"every_steps": 5, "images": False, "tensorboard": False},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "nets.py").write_text(NET)
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    return folder


def train(project: Path, out: str, procs: int, *overrides: str) -> None:
    words = ["train", "recipe.json", *overrides, "--use", "nets", "--out", out]
    done = paceline_ranks(procs, project, *words)
    assert [each.returncode for each in done] == [0] * procs, done[0].stderr


def bits(run: Path, step: int = 30) -> dict[str, str]:
    """Hashes of all that a checkpoint holds; what tells of the number of processes itself is left out."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    found = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in TENSORS}
    state = json.loads((folder / "state.json").read_text())
    text = json.dumps({name: value for name, value in _state(state).items() if name not in ("world", "recipe")})
    return {**found, "state": hashlib.sha256(text.encode()).hexdigest()}


TENSORS = ("model.safetensors", "state.safetensors")


def _state(document: dict[str, object]) -> dict[str, object]:
    inner = document.get("state", document)
    assert isinstance(inner, dict)
    return inner


def metrics(run: Path) -> list[dict[str, object]]:
    """All recorded metrics but those of the clock."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "clock"} for line in lines]


def stop_after(run: Path, step: int) -> None:
    """Leave a run as if it had been killed right after a checkpoint."""
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (run / "best").unlink(missing_ok=True)


def test_world_gives_the_same_bits_on_any_number_of_processes(project: Path) -> None:
    world = "train.reproducible=world"
    for procs in (1, 2, 3, 4):
        train(project, f"world-{procs}", procs, world)
    expected, recorded = bits(project / "world-1"), metrics(project / "world-1")
    assert [each["split"] for each in recorded[-2:]] == ["test.plain", "test.cut"]
    for procs in (2, 3, 4):
        assert bits(project / f"world-{procs}") == expected, procs
        assert metrics(project / f"world-{procs}") == recorded, procs

    shutil.copytree(project / "world-2", project / "moved", symlinks=True)
    for step, procs in ((10, 1), (20, 3)):
        stop_after(project / "moved", step)
        train(project, "moved", procs, world)
        assert bits(project / "moved") == expected, f"on {procs} from step {step}"
    assert metrics(project / "moved") == recorded


def test_a_run_on_three_processes_goes_on_to_the_bit(project: Path) -> None:
    train(project, "whole", 3)
    shutil.copytree(project / "whole", project / "resumed", symlinks=True)
    stop_after(project / "resumed", 10)
    train(project, "resumed", 3)
    assert bits(project / "resumed") == bits(project / "whole")
    assert metrics(project / "resumed") == metrics(project / "whole")
