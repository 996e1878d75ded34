"""The page on data: its recipes are valid, its commands run, and it leaves out nothing that can be named."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.commands.data import read_data_recipe
from paceline.core.registry import register

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
COMMANDS = [
    line[2:] for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.split("\n")
]


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_recipes_are_valid(number: int, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: page\n{RECIPES[number]}", encoding="utf-8")
    read = read_data_recipe(argparse.Namespace(recipe=str(path), overrides=[], use=[]))
    assert "train" in read.recipe.data.splits()


def test_there_are_recipes_for_every_format() -> None:
    assert len(RECIPES) >= 8
    printed = set(re.findall(r"dataset: (\w+)", "".join(RECIPES)))
    assert printed | {"idx", "fashion_small"} >= set(shipped("dataset"))


@pytest.mark.parametrize("kind", ["dataset", "transform"])
def test_every_name_is_on_the_page(kind: str) -> None:
    families = {f"{name.partition('/')[0]}/" if "/" in name else name for name in shipped(kind)}
    missing = [name for name in families if f"`{name}" not in PAGE and f"dataset: {name}" not in PAGE]
    assert missing == []


def shipped(kind: str) -> list[str]:
    registry = register.kind(kind)
    entries = {name: registry.find(name) for name in registry.names()}
    return [name for name, entry in entries.items() if entry and str(entry.target).startswith("paceline.")]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command])
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.removeprefix("paceline ").split()) == 0
