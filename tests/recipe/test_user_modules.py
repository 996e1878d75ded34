"""Modules that a recipe names and a run remembers: commands on it import them again if they are the user's."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.forkserver import Done, paceline, paceline_ranks

from paceline.core.errors import RecipeError, UsageError
from paceline.recipe.load import load
from paceline.recipe.user_modules import import_modules, read_checked

PARTS = """
from pathlib import Path
from torch import nn
from paceline import register

Path(__file__).with_suffix(".imported").touch()

@register.model("one_layer")
class OneLayer(nn.Module):
    def __init__(self, num_classes, in_channels, broken: bool = False):
        super().__init__()
        self.layer, self.broken = nn.Linear(784 * in_channels, num_classes), broken
    def forward(self, images):
        output = self.layer(images.flatten(1))
        return output * float("nan") if self.broken and self.training else output
"""
RECIPE: dict[str, Any] = {
    "name": "mine",
    "use": "parts.py",
    "task": "classification",
    "model": "one_layer",
    "data": {"batch_size": 500} | {split: {"dataset": "fashion_small", "split": "test"} for split in ("train", "val")},
    "losses": ["cross_entropy"],
    "optimizer": {"name": "sgd", "lr": 0.1},
    "train": {"steps": 1},
    "logging": {"images": False, "tensorboard": False, "results": None},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a project and a run of it."""
    folder = tmp_path_factory.mktemp("used")
    (folder / "project").mkdir()
    (folder / "project" / "parts.py").write_text(PARTS)
    (folder / "project" / "recipe.json").write_text(json.dumps(RECIPE))
    done = paceline(folder, "train", "project/recipe.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].endswith("paceline eval runs/mine"), "the printed command needs no --use"
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose recipe may be changed."""
    return shutil.copytree(trained / "runs" / "mine", tmp_path / "mine")


def change(run: Path, use: Any) -> None:
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"use": use}))


def refused(done: Done, *found: str | Path) -> None:
    assert done.returncode == 2, done.stderr
    assert "recipe.yaml:" in done.stderr
    assert all(str(each) in done.stderr for each in found), done.stderr


def test_the_recipe_records_the_file_and_its_hash(trained: Path) -> None:
    parts = trained / "project" / "parts.py"
    recorded = yaml.safe_load((trained / "runs" / "mine" / "recipe.yaml").read_text())["use"]
    assert recorded == [
        {"module": "parts", "file": str(parts), "sha256": hashlib.sha256(parts.read_bytes()).hexdigest()}
    ]


@pytest.mark.parametrize("words", ["eval", "train", "show", "check", "export --format safetensors", "sweep"])
def test_commands_on_a_run_import_it_again(trained: Path, run: Path, words: str) -> None:
    command, *options = words.split()
    further: dict[str, list[str | Path]] = {
        "export": ["--out", run.parent / "out"],
        "sweep": ["train.seed=7,8", "--out", run.parent / "sweep"],
    }
    done = paceline(run.parent, command, run, *options, *further.get(command, []))
    assert done.returncode == 0, done.stderr


def test_ranks_import_it_too(run: Path) -> None:
    done = paceline_ranks(2, run.parent, "eval", run, "--json")
    assert [each.returncode for each in done] == [0, 0], done[0].stderr


def test_a_changed_file_is_used_and_reported(run: Path, trained: Path) -> None:
    recorded = yaml.safe_load((run / "recipe.yaml").read_text())["use"]
    change(run, [recorded[0] | {"sha256": "0" * 64}])
    done = paceline(run.parent, "eval", run)
    assert done.returncode == 0
    assert str(trained / "project" / "parts.py") in done.stderr
    paceline(run.parent, "train", run, "train.steps=2")
    assert yaml.safe_load((run / "recipe.yaml").read_text())["use"] == recorded, "the file that is used now"


def test_a_file_that_is_gone_is_named_until_it_is_given(run: Path, trained: Path) -> None:
    gone = trained / "elsewhere" / "moved.py"
    change(run, [{"module": "moved", "file": str(gone), "sha256": "0" * 64}])
    refused(paceline(run.parent, "eval", run), gone, "--use")
    assert paceline(run.parent, "eval", run, "--use", trained / "project" / "parts.py").returncode == 0


def test_a_strangers_run_imports_nothing(run: Path, trained: Path) -> None:
    """Whatever its recipe says: a file that came with it, a relative one, or a neighbor of one that is the user's."""
    evil = run / "evil.py"
    evil.write_text(PARTS)
    record = {"module": "evil", "file": str(evil), "sha256": hashlib.sha256(evil.read_bytes()).hexdigest()}
    neighbor = {"module": "evil", "file": str(trained / "project" / "parts.py"), "sha256": "0" * 64}
    for use, found in (([record], evil), ("evil.py", "evil.py"), (["evil"], "evil"), ([neighbor], "parts.py")):
        change(run, use)
        for command in ("eval", "train", "predict", "export"):
            further = f"{run} --out {run.parent}/out".split() if command == "predict" else []
            refused(paceline(run, command, run, *further), found, "--use")
    assert not evil.with_suffix(".imported").exists()
    change(run, [record])
    assert paceline(run.parent, "eval", run, "--use", evil).returncode == 0
    assert paceline(run.parent, "eval", run).returncode == 0, "given once, it is the user's"
    other_user = paceline(run.parent, "eval", run, PACELINE_CACHE=str(run.parent / "cache"))
    refused(other_user, evil, "--use")


def test_the_command_of_a_step_that_is_not_finite_works_as_printed(trained: Path, tmp_path: Path) -> None:
    done = paceline(tmp_path, "train", trained / "project" / "recipe.json", "model.broken=true")
    assert done.returncode == 1
    (words,) = re.findall(r"paceline (replay \S+) does", done.stderr.splitlines()[-1])
    assert paceline(tmp_path, *words.split()).returncode == 0


def test_paths_are_those_of_the_file_that_names_them(tmp_path: Path, own_names: None) -> None:
    for folder in ("base", "above"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base" / "base_parts.py").write_text(PARTS)
    (tmp_path / "base" / "base.json").write_text(json.dumps(RECIPE | {"use": ["base_parts.py"]}))
    (tmp_path / "above" / "above.json").write_text(json.dumps({"extends": "../base/base.json", "name": "above"}))
    checked = read_checked(str(tmp_path / "above" / "above.json"))
    file = tmp_path / "base" / "base_parts.py"
    assert [each["file"] for each in checked.resolved()["use"]] == [str(file)]
    assert len(import_modules([str(file)], load(str(tmp_path / "above" / "above.json"))).modules) == 1, "once is enough"


def test_wrong_names_are_told_with_their_place(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    for use in ("no_such.py", "no_such_module"):
        recipe.write_text(json.dumps(RECIPE | {"use": use}))
        with pytest.raises(UsageError, match=rf"recipe.json:1:\d+: use: {use}"):
            read_checked(str(recipe))
    recipe.write_text(json.dumps(RECIPE | {"use": 3, "model": "convnet"}))
    with pytest.raises(RecipeError, match="use"):
        read_checked(str(recipe))
    (tmp_path / "json.py").write_text(PARTS)
    recipe.write_text(json.dumps(RECIPE | {"use": "json.py"}))
    with pytest.raises(UsageError, match=r"json/__init__\.py; rename"):
        read_checked(str(recipe))
    with pytest.raises(RecipeError, match="--use"):
        load(str(recipe), ["use=parts.py"])
