"""Recipes changed at random are accepted or refused in whole lines; the long form is `python -m chaos recipes`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import RecipeError, UsageError
from paceline.recipe.load import load
from paceline.recipe.resolved import recipe_lines
from paceline.recipe.validate import validate

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def chaos_recipes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("chaos.recipes")


def test_recipes_changed_at_random(chaos_recipes: Any) -> None:
    outcomes = chaos_recipes.fuzz(400, key=11)
    assert sum(outcomes.values()) >= 400
    assert min(outcomes["accepted"], outcomes["refused"]) > 20


def test_a_fuzzer_that_would_notice(chaos_recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = chaos_recipes.Case("recipe.yaml", b"extends: quickstart", [])
    assert chaos_recipes.judge(good, tmp_path) == "accepted"

    def careless(reference: str, overrides: list[str]) -> None:
        Path(reference).with_name(chaos_recipes.CANARY).touch()
        raise RecipeError("refused")

    monkeypatch.setattr(chaos_recipes, "load", careless)
    with pytest.raises(AssertionError, match="files were made: \\['executed'\\]"):
        chaos_recipes.judge(good, tmp_path)


def test_written_recipes_hold_any_name(tmp_path: Path) -> None:
    names = ["plain", "a b: c", "# x", "0", "true", "line\nend", "\x8b", "\U0001f6b4", "\ufeff", "é", '"', "-"]
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"extends": "quickstart", "expect": dict.fromkeys(names, 0.5)}))
    checked = validate(load(str(path)))
    (tmp_path / "again.yaml").write_text("\n".join(recipe_lines(checked.resolved(), checked)), encoding="utf-8")
    assert validate(load(str(tmp_path / "again.yaml"))).resolved() == checked.resolved()


@pytest.mark.parametrize("override", ["a\nb", "=\x1b[31m", ".\r=1", "\u202ex"])
def test_what_is_typed_is_printed_in_one_line(override: str) -> None:
    with pytest.raises(UsageError) as caught:
        load("quickstart", [override])
    assert str(caught.value).isprintable()
