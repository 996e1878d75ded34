"""`paceline new`: a project for each task, created, trained on two processes, and tested by its own tests."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from shared_launch import SCRIPTS
from support.forkserver import script_ranks

from paceline import build, train
from paceline.checkpoint.reader import open_checkpoint
from paceline.cli import main
from paceline.commands import new
from paceline.loggers.jsonl import read_records

ROOT = Path(__file__).resolve().parents[2]
TASKS = [
    "classification",
    "detection",
    "instance_segmentation",
    "keypoints",
    "masked_autoencoder",
    "saliency",
    "segmentation",
    "video",
]
TEST = """
import os, sys, unittest
for folder in sys.argv[1:]:
    os.chdir(folder)
    for name in ("parts", "test_parts"):
        sys.modules.pop(name, None)
    tests = unittest.TestLoader().discover(folder)
    assert tests.countTestCases() == 3
    done = unittest.TextTestRunner().run(tests)
    sys.path.remove(folder)
    if not done.wasSuccessful():
        sys.exit(1)
assert "pytest" not in sys.modules, "a project is tested without it"
"""


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a project for each task, each trained for three steps on two processes."""
    root = tmp_path_factory.mktemp("projects")
    for task in TASKS:
        assert main(["new", str(root / task), "--task", task]) == 0
    done = script_ranks(2, SCRIPTS / "train_projects.py", root, *TASKS, OMP_NUM_THREADS="1")
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    return root


@pytest.mark.parametrize("task", TASKS)
def test_each_project_trains_on_two_processes(projects: Path, task: str) -> None:
    run = projects / task / "runs" / task
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert (run / "logs" / "rank-1.log").exists()
    (measured,) = [record for record in read_records(run / "metrics.jsonl") if record["split"] == "val"]
    assert math.isfinite(measured["my_metric"])
    assert (run / "best").exists()
    assert len(list((run / "images").glob("val-*.png"))) >= 1


def test_the_tests_of_each_project_pass(projects: Path, tmp_path: Path) -> None:
    (tmp_path / "test_all.py").write_text(TEST)
    (done,) = script_ranks(1, tmp_path / "test_all.py", *(projects / task for task in TASKS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("task", TASKS)
def test_each_project_is_whole_and_marked(projects: Path, task: str) -> None:
    folder = projects / task
    assert {path.name for path in folder.iterdir()} >= {
        "README.md",
        "data",
        "parts.py",
        "recipe.yaml",
        "finetune.yaml",
        "test_parts.py",
    }
    parts, recipe = ((folder / name).read_text(encoding="utf-8") for name in ("parts.py", "recipe.yaml"))
    for words in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), str(folder)]
        assert subprocess.run(ruff, capture_output=True).returncode == 0, words
    for place in ("your model", "your data set", "your loss", "your metric", "your layer ids"):
        assert f"# ← {place}" in parts
    written: dict[str, Any] = yaml.safe_load(recipe)
    assert (written["name"], written["task"]) == (task, task)
    assert written.get("losses", []) == ([] if task in ("detection", "instance_segmentation") else ["my_loss"])
    assert ("random_masking" in recipe) == (task == "masked_autoencoder")
    assert "$" not in recipe + parts
    assert "#:" not in recipe + parts


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize("task", TASKS)
def test_each_project_is_finetuned(projects: Path, task: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(projects / task)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    run = build(
        "finetune.yaml", {"train.epochs": None, "train.steps": 1, "logging.tensorboard": False}, tmp_path / "run"
    )
    trained = open_checkpoint(projects / task / "runs" / task / "checkpoints" / "step-00000003").model
    now = {name.removeprefix("body."): tensor for name, tensor in run.model.named_parameters()}
    first, last = list(now)[0 if task != "masked_autoencoder" else 1], list(now)[-1]
    assert torch.equal(now[first], trained[first]), "weights"
    assert last not in trained or not torch.equal(now[last], trained[last]), "a new head"
    assert not all(tensor.requires_grad for tensor in now.values()), "freezing"
    rates = {group["lr"] for group in run.state.optimizer.param_groups}
    assert len(rates) >= 2, "layer ids"
    train(run)
    monkeypatch.delitem(sys.modules, "parts", raising=False)


def test_a_name_that_no_recipe_may_have_is_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path / "my flowers & co")]) == 0
    assert yaml.safe_load((tmp_path / "my flowers & co" / "recipe.yaml").read_text())["name"] == "my_flowers_co"
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert printed[0].startswith("cd '")
    assert [line.split()[:3] for line in printed[1:]] == [
        ["paceline", word, "recipe.yaml"] for word in ("check", "train")
    ]


def test_the_task_is_named_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path / "cells"), "--task", "instance_segmentation"]) == 0
    assert "cells: an instance segmentation project that trains as it is." in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").touch()
    for name in ("full", "file", "file/below"):
        assert main(["new", str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "notes.txt"]
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


def test_nothing_is_left_behind_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*arguments: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new, "write_samples", full_disk)
    assert main(["new", str(tmp_path / "project")]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("own_names")
def test_a_project_is_checked_from_elsewhere_and_a_misspelt_file_is_named(
    projects: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its data is found beside its recipe."""
    monkeypatch.chdir(projects)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    words = ["check", "saliency/recipe.yaml", "train.threads=1"]
    assert main(words) == 0, capsys.readouterr().err
    assert main([*words, "data.train.root=nowhere"]) == 3
    assert "data.train.root: nowhere does not exist" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "parts")
    monkeypatch.chdir(projects / "saliency")
    assert main(["check", "recipe.yaml", "--use", "part.py"]) == 2
    assert "did you mean parts.py?" in capsys.readouterr().err
