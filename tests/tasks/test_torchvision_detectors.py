"""Every family of torchvision's detectors trains a step and is evaluated on two processes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from forkserver import script_ranks
from sample_recipes import SCRIPTS, records, settings_kept

from paceline import cli

# The smallest image that each takes: SSD300's last layers have no padding.
SIZES = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": 64,
    "fcos_resnet50_fpn": 64,
    "retinanet_resnet50_fpn": 64,
    "ssd300_vgg16": 300,
    "ssdlite320_mobilenet_v3_large": 64,
}


def recipe(name: str, size: int, data: Path) -> dict[str, Any]:
    split: dict[str, Any] = {"dataset": "coco", "root": str(data)}
    normalize = {"name": "normalize", "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}
    split["transforms"] = [{"name": "resize", "size": [size, size]}, normalize]
    return {
        "name": name,
        "task": "detection",
        "model": {"name": f"torchvision/detection/{name}"},
        "data": {
            "batch_size": 4 if name.startswith("ssdlite") else 2,  # its last BatchNorm sees one pixel of each image
            "num_workers": 0,
            "train": {**split, "annotations": "train.json"},
            "val": {**split, "annotations": "val.json"},
        },
        "optimizer": {"name": "sgd", "lr": 0.001},
        "train": {"steps": 1, "threads": 1, "device": "cpu", "reproducible": "off"},
        "evaluate": {"batch_size": 1},
        "logging": {"every_steps": 1, "images": False, "tensorboard": False},
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each, by two processes that do one after the other, since to start some costs the most."""
    folder = tmp_path_factory.mktemp("detectors")
    with settings_kept():
        assert cli.main(["sample", "detection", str(folder / "data"), "--number", "8"]) == 0
    commands = []
    for name, size in SIZES.items():
        (folder / name).mkdir()
        path = folder / name / "recipe.json"
        path.write_text(json.dumps(recipe(name, size, folder / "data")), encoding="utf-8")
        commands.append([["train", str(path), "--out", str(folder / name / "run")], str(folder / name)])
    (folder / "commands.json").write_text(json.dumps(commands), encoding="utf-8")
    done = script_ranks(2, SCRIPTS / "commands_in_turn.py", folder / "commands.json")
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    return folder


@pytest.mark.parametrize("name", SIZES)
def test_a_step_and_an_evaluation_on_two_processes(name: str, trained: Path) -> None:
    by_split = {record["split"]: record for record in records(trained / name / "run")}
    assert by_split["val"]["num_samples"] == 2
    assert "ap50" in by_split["val"]
    assert by_split["train"]["step"] == 1
    assert 0 < by_split["train"]["loss"] < math.inf
