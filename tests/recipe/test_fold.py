"""`data.fold`: one key for the fold of all splits, and a sweep over it as a whole cross-validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.forkserver import paceline

from paceline.core.errors import RecipeError
from paceline.recipe.load import load
from paceline.recipe.validate import validate

IMAGES: dict[str, Any] = {"dataset": "list_file", "file": "folds.csv"}
RECIPE: dict[str, Any] = {
    "name": "crossed",
    "task": {"name": "classification", "top_k": [1]},
    "model": {"name": "convnet", "widths": [4]},
    "data": {"batch_size": 4, "train": IMAGES | {"split": "train"}, "val": IMAGES | {"split": "val"}},
    "losses": ["cross_entropy"],
    "optimizer": {"name": "sgd", "lr": 0.1},
    "train": {"steps": 1},
    "logging": {"images": False, "tensorboard": False, "results": None},
}


def write(folder: Path, **data: Any) -> str:
    (folder / "recipe.json").write_text(json.dumps(RECIPE | {"data": RECIPE["data"] | data}))
    return str(folder / "recipe.json")


def folds(reference: str, *overrides: str) -> list[Any]:
    resolved = validate(load(reference, overrides)).resolved()["data"]
    return [resolved[split]["fold"] for split in ("train", "val")]


def test_one_key_holds_for_all_splits(tmp_path: Path) -> None:
    assert folds(write(tmp_path, fold=1)) == [1, 1]
    assert folds(write(tmp_path), "data.fold=2") == [2, 2]
    fixed = {split: RECIPE["data"][split] | {"fold": 0} for split in ("train", "val")}
    assert folds(write(tmp_path, **fixed), "data.fold=3") == [3, 3], "the command line wins"


def test_a_split_without_a_fold_is_told_of_the_key_for_all_splits(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.json:1:\d+: data\.train: split needs .*data\.fold"):
        folds(write(tmp_path))
    assert folds(write(tmp_path), "data.fold=0") == [0, 0]


def test_folds_that_do_not_complement_each_other_are_refused(tmp_path: Path) -> None:
    overlapping = ("data.train.fold=0", "data.val.fold=1")
    with pytest.raises(RecipeError, match=r"data\.val\.fold: differs from data\.train\.fold"):
        folds(write(tmp_path), *overlapping)
    with pytest.raises(RecipeError, match=r"data\.val\.fold: differs from data\.train\.fold"):
        folds(write(tmp_path, train=IMAGES), "data.val.fold=1")
    with pytest.raises(RecipeError, match=r"data\.val\.fold: differs from data\.fold, which is 0"):
        folds(write(tmp_path, fold=0), "data.val.fold=1")
    with pytest.raises(RecipeError, match=r"data\.fold: no data set"):
        folds("quickstart", "data.fold=0")


def test_a_sweep_trains_all_folds(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    lines = ["image,label,part,fold"]
    for number in range(12):
        Image.fromarray(generator.integers(0, 255, (16, 16, 3), np.uint8)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{'ab'[number % 2]},,{number // 4}")
    (tmp_path / "folds.csv").write_text("\n".join(lines))
    done = paceline(tmp_path, "sweep", write(tmp_path), "data.fold=0,1,2", "--jobs", "2", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    values = [run["metrics"]["top1"] for run in answer["runs"]]
    (summary,) = answer["summaries"]
    assert summary["num_runs"] == len(values) == 3
    assert summary["mean"]["top1"] == pytest.approx(np.mean(values))
    assert summary["standard_deviation"]["top1"] == pytest.approx(np.std(values, ddof=1))
    assert sorted(run["differs"]["data.train.fold"] for run in answer["runs"]) == [0, 1, 2]
    assert all("data.val.fold" not in run["differs"] for run in answer["runs"])
