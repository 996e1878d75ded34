"""A run goes on though the package has learned new keys since it began."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.store import Store
from paceline.recipe.load import load
from paceline.recipe.resolved import recipe_differences
from paceline.recipe.validate import validate

# Keys with defaults, in sections, in parts with a name, in lists, and a section as a whole.
NEWER = ["train.on_nonfinite", "train.sync_bn", "optimizer.trust_ratio", "losses.0.class_weights", "evaluate.threads"]
NEWER += ["model.dropout", "task.top_k", "logging", "schedule"]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A whole recipe without anything that is not said."""
    monkeypatch.chdir(tmp_path)
    written = {
        "name": "old",
        "task": "classification",
        "model": {"name": "convnet", "widths": [4]},
        "data": {"batch_size": 64, "train": {"dataset": "fashion_small", "split": "train"}},
        "losses": ["cross_entropy"],
        "optimizer": {"name": "sgd", "lr": 0.1},
        "train": {"steps": 2},
    }
    Path("recipe.json").write_text(json.dumps(written))
    return validate(load("recipe.json")).resolved()


def without(recipe: dict[str, Any], *keys: str) -> dict[str, Any]:
    left = copy.deepcopy(recipe)
    for key in keys:
        *parents, last = key.split(".")
        place: Any = left
        for parent in parents:
            place = place[int(parent) if parent.isdecimal() else parent]
        del place[last]
    return left


@pytest.mark.parametrize("key", NEWER)
def test_a_key_that_was_added_counts_as_its_default(key: str, recipe: dict[str, Any]) -> None:
    assert recipe_differences(without(recipe, key), recipe) == []


def test_an_empty_list_is_no_other_than_none(recipe: dict[str, Any]) -> None:
    older = copy.deepcopy(recipe)
    older["optimizer"]["param_groups"] = None
    assert recipe_differences(older, recipe) == recipe_differences(recipe, older) == []
    recipe["optimizer"]["param_groups"] = [{"match": "head", "lr_scale": 2}]
    assert [line.partition(":")[0] for line in recipe_differences(older, recipe)] == [
        "optimizer.param_groups.0.match",
        "optimizer.param_groups.0.lr_scale",
    ]


def test_another_value_than_the_default_is_a_change(recipe: dict[str, Any]) -> None:
    now = copy.deepcopy(recipe)
    now["train"]["sync_bn"] = True
    assert recipe_differences(without(recipe, "train.sync_bn"), now) == ["train.sync_bn: was false, is true"]


def test_a_run_whose_splits_were_drawn_from_all_samples_alike_may_say_so(recipe: dict[str, Any]) -> None:
    before, now = copy.deepcopy(recipe), copy.deepcopy(recipe)
    before["data"]["train"] |= {"stratify": True}
    now["data"]["train"] |= {"stratify": False}
    assert recipe_differences(before, now) == [], "whether the samples are the same, the fingerprint tells"


def test_a_key_that_is_gone_is_a_change(recipe: dict[str, Any]) -> None:
    before = copy.deepcopy(recipe)
    before["train"]["magic"] = 3
    assert recipe_differences(before, recipe) == ["train.magic: was 3, is null"]


def test_a_run_of_an_older_version_goes_on(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "recipe.json", "--out", "run", "logging.tensorboard=false", "logging.images=false"]
    assert cli.main(words) == 0
    checkpoint = open_checkpoint(tmp_path / "run")
    state = {**checkpoint.state, "recipe": without(checkpoint.state["recipe"], *NEWER)}
    Store(tmp_path / "run" / "checkpoints").save(checkpoint.step, checkpoint.model, state, checkpoint.metrics)
    assert cli.main([*words, "train.steps=4"]) == 0
    assert "resumes after step 2" in capsys.readouterr().err
    assert open_checkpoint(tmp_path / "run").step == 4
