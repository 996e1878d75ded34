"""Every family of torchvision's detectors trains a step and is evaluated on two processes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.forkserver import paceline_ranks
from support.sample_recipes import records, settings_kept

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
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detectors") / "data"
    with settings_kept():
        assert cli.main(["sample", "detection", str(folder), "--number", "8"]) == 0
    return folder


@pytest.mark.parametrize("name", SIZES)
def test_a_step_and_an_evaluation_on_two_processes(name: str, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe(name, SIZES[name], data)), encoding="utf-8")
    done = paceline_ranks(2, tmp_path, "train", path, "--out", "run")
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    by_split = {record["split"]: record for record in records(tmp_path / "run")}
    assert by_split["val"]["num_samples"] == 2
    assert "ap50" in by_split["val"]
    assert by_split["train"]["step"] == 1
    assert 0 < by_split["train"]["loss"] < math.inf
