"""A training set without any object is refused before anything is made; sets to evaluate on may have none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sample_recipes import settings_kept, write_sample

from paceline.cli import main


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with settings_kept():
        yield


def spoil(file: Path, change: Callable[[list[dict[str, Any]]], None]) -> int:
    """Change the annotations of a COCO file; how many there were."""
    content = json.loads(file.read_text())
    number = len(content["annotations"])
    change(content["annotations"])
    file.write_text(json.dumps(content))
    return number


def flatten(annotations: list[dict[str, Any]]) -> None:
    for each in annotations:
        each["bbox"][2] = 0


def crowd(annotations: list[dict[str, Any]]) -> None:
    for each in annotations:
        each["iscrowd"] = 1


@pytest.mark.parametrize("change", [list.clear, flatten, crowd])
def test_a_training_set_without_objects_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[list[dict[str, Any]]], None]
) -> None:
    recipe = write_sample("detection", tmp_path)
    number = spoil(tmp_path / "detection" / "train.json", change)
    spoil(tmp_path / "detection" / "val.json", change)
    for command in (["check", str(recipe)], ["train", str(recipe), "--out", str(tmp_path / "run")]):
        assert main(command) == 3
        found = capsys.readouterr()
        (line,) = [each for each in (found.out + found.err).splitlines() if "to learn from" in each]
        assert "data.train: " in line
        assert f"{tmp_path}/detection/train.json: none of its 21 images has an object to learn from" in line
        assert (f"{number} of {number} boxes are bad: {number} empty" in line) == (change is flatten)
    assert not (tmp_path / "run").exists()


def test_an_evaluation_set_may_have_no_object(tmp_path: Path) -> None:
    recipe = write_sample("detection", tmp_path)
    spoil(tmp_path / "detection" / "val.json", list.clear)
    assert main(["train", str(recipe), "train.steps=1", "--out", str(tmp_path / "run")]) == 0
