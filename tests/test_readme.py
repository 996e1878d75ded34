"""Every command and every file in the README works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from support.forkserver import paceline, script_ranks

from paceline.recipe.load import load
from paceline.recipe.validate import validate

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    return [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has made by following the README: a batch of flowers, their recipe, a module."""
    folder = tmp_path_factory.mktemp("readme")
    generator = np.random.default_rng(0)
    for split, number in (("train", 16), ("val", 1)):
        for name in ("daisy", "rose"):
            (folder / "flowers" / split / name).mkdir(parents=True)
            for index in range(number):
                image = generator.integers(0, 255, (60, 70, 3), dtype=np.uint8)
                cv2.imwrite(str(folder / "flowers" / split / name / f"{index}.jpg"), image)
    (folder / "flowers.yaml").write_text(blocks("yaml")[0])
    (folder / "my_module.py").write_text(blocks("python")[0])
    (folder / "loop.py").write_text(
        blocks("python")[1].replace('"train.epochs": 1', '"train.epochs": 1, "model.widths": [2]')
    )
    return folder


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """The command as it is installed."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(command.split(), cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_commands_run_in_order(folder: Path) -> None:
    assert len(commands()) >= 8
    for command in commands():
        program, *words = command.split()
        assert program == "paceline"
        done = paceline(folder, *words)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert "NOT reached" not in done.stdout + done.stderr, command


def test_what_can_be_appended_to_a_command_works(folder: Path) -> None:
    rows = re.findall(r"^\| [\w -]+ \| `([^`]+)`", README.split("| to get |")[1].split("## ")[0], flags=re.MULTILINE)
    runnable = [row for row in rows if "HOST" not in row]
    assert len(runnable) == len(rows) - 1 >= 4
    (shared,) = [row for row in runnable if "--procs" in row]
    short = "model.widths=[4] train.epochs=null train.steps=2 schedule.warmup_epochs=0.01 evaluate.batch_size=1000"
    for number, row in enumerate((shared, " ".join(row for row in runnable if row != shared))):
        words = f"train quickstart {short} --out runs/appended-{number} {row}".split()
        done = paceline(folder, *words)
        assert done.returncode == 0, f"{row}\n{done.stderr}"


def test_the_whole_recipe_is_valid(folder: Path) -> None:
    recipe = validate(load(str(folder / "flowers.yaml"))).recipe
    assert recipe.optimizer.weight_decay == 1e-4


def test_the_loop_of_ones_own_runs(folder: Path) -> None:
    (done,) = script_ranks(1, folder / "loop.py")
    assert done.returncode == 0, done.stderr
    assert 0.1 < float(done.stdout) <= 1


def test_the_errors_printed_are_the_errors_given(folder: Path) -> None:
    wrong = blocks("yaml")[0].replace("lr: 0.01", "lr: fast").replace("epochs: 10", "epoch: 10")
    (folder / "wrong").mkdir()
    (folder / "wrong" / "flowers.yaml").write_text(wrong)
    done = run(folder / "wrong", "paceline check flowers.yaml")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [line for line in README.splitlines() if line.startswith("flowers.yaml:")]


def test_the_two_commands_exist() -> None:
    for target, expected in (("train", "paceline train quickstart"), ("test", "pytest")):
        dry_run = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert dry_run.returncode == 0
        assert expected in dry_run.stdout


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150
