"""What cannot work with several processes is refused in a sentence, by all of them alike, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shared_launch import SCRIPTS, environment
from support import forkserver

from paceline import cli

RECIPE = {
    "name": "wrong",
    "task": "classification",
    "model": {"name": "flat"},
    "data": {"batch_size": 16, "train": {"dataset": "few", "split": "train", "count": 40}},
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "adamw", "lr": 0.01},
    "train": {"steps": 3, "micro_batch_size": 5},
    "logging": {"images": False, "tensorboard": False},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(SCRIPTS)
    return tmp_path


WORLD = "train.reproducible=world"
IMPOSSIBLE = {
    "fsdp": ([WORLD, "train.strategy=fsdp"], "train.reproducible: world is incompatible with train.strategy fsdp"),
    "zero": ([WORLD, "train.strategy=zero"], "train.reproducible: world is incompatible with train.strategy zero"),
    "dp": ([WORLD, "train.strategy=dp"], "train.reproducible: world is incompatible with train.strategy dp"),
    "sync_bn": ([WORLD, "train.sync_bn=true"], "train.reproducible: world is incompatible with train.sync_bn"),
    "loss_scale": (
        ["train.precision=bf16", "train.loss_scale=128"],
        "train.loss_scale: given, but train.precision bf16",
    ),
    "O2": (["train.precision=O2", "train.strategy=fsdp"], "train.precision: expected fp32, tf32, bf16, fp16, O0 or O1"),
    "compile": (["train.compile=true", "train.strategy=zero"], "train.compile: incompatible with train.strategy zero"),
    "procs": (["--procs", "0"], "--procs: expected a number from 1 to "),
    "restarts": (["--restarts", "-1"], "--restarts: expected a number >= 0, got -1"),
    "rendezvous": (["--nodes", "2"], "--nodes and --rendezvous"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_is_refused_before_any_process_is_started(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = IMPOSSIBLE[name]
    assert cli.main(["train", "recipe.json", "--use", "shared_parts", "--procs", "2", *words]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1
    assert expected in printed[0]
    assert [path.name for path in folder.iterdir()] == ["recipe.json"]


def run(folder: Path, *words: str) -> forkserver.Done:
    path = environment()["PYTHONPATH"]
    return forkserver.paceline(folder, "train", "recipe.json", *words, "--use", "shared_parts", PYTHONPATH=path)


def test_missing_data_is_reported_once(folder: Path) -> None:
    done = run(folder, "--procs", "2", "data.train={dataset: image_folder, root: nowhere}")
    assert done.returncode == 3
    assert done.stdout == ""
    *notes, message = done.stderr.splitlines()
    assert len(notes) == len(set(notes)) == 2
    assert "data.train.count: dropped, since data.train.dataset=image_folder" in "".join(notes)
    assert "data.train.root: nowhere does not exist" in message
    assert [path.name for path in folder.iterdir()] == ["recipe.json"]


def test_a_rendezvous_that_nobody_comes_to_is_given_up(folder: Path) -> None:
    done = run(folder, "--nodes", "2", "--rendezvous", "192.0.2.1:29400", "--rendezvous-timeout", "1")
    assert done.returncode == 1
    waiting, message = done.stderr.splitlines()
    assert waiting == "waiting for 2 machines at 192.0.2.1:29400"
    assert message.startswith("--rendezvous 192.0.2.1:29400: ")
    assert [path.name for path in folder.iterdir()] == ["recipe.json"]


def test_what_brings_nothing_here_runs_and_says_so(folder: Path) -> None:
    done = run(folder, "train.strategy=fsdp", "train.precision=fp16")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert sum("fsdp: " in line and "one process saves no memory" in line for line in lines) == 1
    assert sum("warning: float16 is slow on a CPU" in line for line in lines) == 1
