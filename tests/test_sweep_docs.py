"""The pages on sweeps and on installing: snippets are valid, commands work as they stand there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.recipe.load import load
from paceline.recipe.search_space import Choices, Range, read_search_space
from paceline.recipe.validate import validate

DOCS = Path(__file__).resolve().parent.parent / "docs"
SWEEP, INSTALL = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("sweep", "install"))
COMMANDS = re.findall(r"^\$ paceline (.*)$", SWEEP, re.MULTILINE)
SHORT = ["train.epochs=null", "train.steps=2", "schedule.warmup_epochs=0.01", "logging.images=false"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_snippets_are_valid(folder: Path) -> None:
    (snippet,) = re.findall(r"```yaml\n(.*?)```", SWEEP, re.DOTALL)
    Path("recipe.yaml").write_text(f"extends: quickstart\nname: page\n{snippet}")
    logging = validate(load("recipe.yaml")).recipe.logging
    assert logging.wandb
    assert logging.mlflow


def test_values_mean_what_the_table_says() -> None:
    rows = re.findall(r"^\| `(\S+?=.*?)` \| (.*) \|$", SWEEP, re.MULTILINE)
    assert len(rows) == 7
    for override, meaning in rows:
        parts = read_search_space([override, "train.seed=0,1"]).parts
        kind = Range if "a range" in meaning else str if "one value" in meaning else Choices
        assert isinstance(parts[0], kind), override
        if isinstance(parts[0], Choices):
            assert len(parts[0].values) == (3 if "fold" in override else 2)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_plan_what_they_say(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one is checked in full; nothing is started."""
    monkeypatch.setattr("paceline.commands.sweep._run", lambda *_: 0)
    assert main(shlex.split(command)) == 0
    (file,) = Path().glob("runs/*/sweep.json")
    trials = json.loads(file.read_text())["trials"]
    expected = {"quickstart-sweep": 4, "random": 2}
    assert len(trials) == expected[file.parent.name]


def test_a_random_search_runs_and_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [each for each in COMMANDS if "--samples" in each]
    words = shlex.split(command.replace("train.epochs=1 ", ""))
    assert main([*words, *SHORT, "--jobs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("classification, val")
    assert {"run", "widths", "lr", "top1"} <= set(lines[1].split())
    assert {line.split()[0] for line in lines[2:4]} == {"quickstart-00", "quickstart-01"}


def test_commands_of_the_install_page_work(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^\$ paceline (recipes.*)$", INSTALL, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)) == 0
        assert "quickstart" in capsys.readouterr().out
