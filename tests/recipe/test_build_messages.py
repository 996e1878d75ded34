"""What building says of data and of a model that do not fit the recipe: the key, the place, both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import paceline
from paceline import cli
from paceline.core.errors import DataError, RecipeError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_images(root: str, labels: list[str]) -> dict[str, Any]:
    for label in labels:
        folder = Path(root, label)
        folder.mkdir(parents=True)
        image = np.zeros((28, 28, 3), np.uint8)
        assert cv2.imwrite(str(folder / "0.png"), image)
    return {"dataset": "image_folder", "root": root, "transforms": []}


def test_a_wrong_unfreeze_is_named_where_it_was_given() -> None:
    Path("r.yaml").write_text("extends: quickstart\nmodel:\n  freeze: [stages]\n")
    stages = [{"match": ["stages.2"], "at_epochs": 2}, {"match": ["stagse.1"], "at_epochs": 1}]
    with pytest.raises(RecipeError) as refusal:
        paceline.build("r.yaml", {"model.unfreeze": stages})
    assert str(refusal.value).startswith("command line: model.unfreeze.1: ")
    with pytest.raises(RecipeError) as refusal:
        paceline.build("r.yaml", {"model.unfreeze": stages, "model.freeze": ["stagse"]})
    assert str(refusal.value).startswith("command line: model.freeze: ")


def test_classes_that_do_not_match_are_named_for_each_side() -> None:
    train = write_images("train", ["both", *(f"cls{n}" for n in range(7))])
    val = write_images("val", ["both", "other"])
    with pytest.raises(DataError) as refusal:
        paceline.build("quickstart", {"data.train": train, "data.val": val})
    sides = str(refusal.value).split(": ", 4)[-1].split("; ")
    assert sides == [
        "only data.val has other",
        "only data.train has cls0, cls1, cls2, cls3, cls4 and 2 more",
    ]


@pytest.mark.parametrize("key", ["data.train.list_file", "data.val.list_file"])
def test_a_missing_file_is_named_by_its_own_key(key: str) -> None:
    write_images(".", ["images", "masks"])
    part = {"dataset": "image_mask", "root": ".", "classes": ["background"], "list_file": None}
    with pytest.raises(DataError) as refusal:
        paceline.build("segmentation_sample", {"data.train": part, "data.val": part, key: "gone.txt"})
    assert str(refusal.value).startswith(f"command line: {key}: ")


def test_a_metric_of_another_task_is_named() -> None:
    assert cli.main(["sample", "detection", "data/detection_sample", "--number", "8"]) == 0
    run = paceline.build("detection_sample", {"evaluate.metrics": ["top_k"], "train.epochs": 1})
    with pytest.raises(RecipeError, match=r"evaluate\.metrics: TopK .* Detection "):
        paceline.evaluate(run, "val")
