"""`paceline.Recipe`: what is written in Python is checked as a file is, in the same words, and builds the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.core.errors import RecipeError, UsageError
from paceline.recipe.load import load
from paceline.recipe.schema import Data, DatasetPart, LossPart, OptimizerPart, StrategyPart, Train, TransformPart
from paceline.recipe.validate import validate

TRAIN = DatasetPart(dataset="fashion_small", split="train", transforms=["random_horizontal_flip"])  # type: ignore[list-item]
TREE: dict[str, Any] = {
    "name": "written",
    "task": "classification",
    "model": {"name": "convnet", "widths": [2]},
    "data": {
        "batch_size": 500,
        "train": {"dataset": "fashion_small", "split": "train", "transforms": ["random_horizontal_flip"]},
        "val": {"dataset": "fashion_small", "split": "test"},
    },
    "losses": ["cross_entropy"],
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "train": {"steps": 2, "strategy": "single"},
}


def sections() -> dict[str, Any]:
    """The same as `TREE`, in the classes of the schema."""
    return TREE | {
        "data": Data(batch_size=500, train=TRAIN, val=DatasetPart(dataset="fashion_small", split="test")),
        "losses": (LossPart(name="cross_entropy"),),
        "optimizer": OptimizerPart(name="sgd", lr=np.float64(0.1), momentum=0.9),
        "train": Train(steps=2, strategy=StrategyPart(name="single")),
    }


def in_file(folder: Path, tree: dict[str, Any]) -> str:
    file = folder / "recipe.json"
    file.write_text(json.dumps(tree))
    return str(file)


def test_mappings_and_sections_are_the_recipe_of_the_file(tmp_path: Path) -> None:
    expected = validate(load(in_file(tmp_path, TREE))).resolved()
    for written in (TREE, sections()):
        recipe = paceline.Recipe(**written)
        assert recipe.checked().resolved() == expected
        assert recipe.model_dump(mode="json", fallback=str) == expected
    assert recipe.optimizer.lr == 0.1
    assert paceline.Recipe.load(in_file(tmp_path, TREE)).checked().resolved() == expected


WRONG: dict[str, Any] = {
    "task": "clasification",
    "model": {"name": "convnet", "widths": [0]},
    "data": {"batchsize": 3, "train": {"dataset": "fashion_small", "transforms": [{"name": "resize", "size": "big"}]}},
    "losses": ["cross_entropy"],
    "optimizer": {"name": "sgd", "lr": "fast", "momentun": 0.9},
    "train": {"epochs": 0},
}


def test_mistakes_are_those_of_the_file_with_its_place_left_out(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as in_a_file:
        validate(load(in_file(tmp_path, WRONG)))
    expected = {f"Recipe: {line.split(': ', 1)[1]}" for line in in_a_file.value.problems}
    dataset = DatasetPart(dataset="fashion_small", transforms=[TransformPart(name="resize", size="big")])
    typed = WRONG | {
        "data": Data(batchsize=3, train=dataset),  # type: ignore[call-arg]
        "optimizer": OptimizerPart(name="sgd", lr="fast", momentun=0.9),  # type: ignore[arg-type]
        "train": Train(epochs=0),
    }
    for written in (WRONG, typed):
        with pytest.raises(RecipeError) as in_python:
            paceline.Recipe(**written)
        assert set(in_python.value.problems) == expected
    assert len(expected) == 10


def test_what_no_recipe_holds_is_named_by_its_key() -> None:
    with pytest.raises(RecipeError, match=r"Recipe: model\.args\.layer: expected .*, got type"):
        paceline.Recipe(**TREE | {"model": {"name": "timm/resnet18", "args": {"layer": int}}})
    with pytest.raises(RecipeError, match=r"Recipe: expect: expected .*, got a key of type int"):
        paceline.Recipe(**TREE | {"expect": {1: 0.5}})


def test_it_builds_what_the_file_builds_and_takes_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = paceline.Recipe(**sections())
    run = paceline.build(recipe, {"train.steps": 1, "optimizer.lr": np.float32(0.5)})
    assert (run.out, run.progress.total_steps, run.state.recipe["optimizer"]["lr"]) == (Path("runs/written"), 1, 0.5)
    with pytest.raises(RecipeError, match=r"command line: optimizer\.lr: expected a number > 0"):
        paceline.build(recipe, {"optimizer.lr": "fast"})
    with pytest.raises(RecipeError, match=r"Recipe: data\.val\.root|Recipe: data\.val"):
        paceline.build(paceline.Recipe(**TREE | {"data": TREE["data"] | {"val": {"dataset": "idx", "root": "gone"}}}))
    with pytest.raises(UsageError, match="changed copy"):
        paceline.build(recipe.model_copy(update={"name": "other"}))


def test_it_extends_others(tmp_path: Path) -> None:
    recipe = paceline.Recipe(extends="quickstart", train={"epochs": 2})
    assert recipe.train.epochs == 2
    assert recipe.model == paceline.Recipe.load("quickstart").model
    with pytest.raises(RecipeError, match=r"Recipe: extends: .* did you mean"):
        paceline.Recipe(extends="quickstrat")


def test_it_needs_no_torch() -> None:
    code = "import sys, paceline; paceline.Recipe.load('quickstart'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
