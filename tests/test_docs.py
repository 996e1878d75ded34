"""All pages: links lead somewhere, snippets of recipes are valid, and so are the keys that the text names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.recipe.load import load
from paceline.recipe.validate import validate

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RECIPES = ["learning.md", "processes.md"]
"""Pages whose snippets are parts of any recipe; other tests hold those of data and of tasks."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http|#)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", RECIPES)
def test_snippets_are_valid(name: str, tmp_path: Path) -> None:
    snippets = blocks(ROOT / "docs" / name, "yaml")
    assert snippets
    for snippet in snippets:
        (tmp_path / "recipe.yaml").write_text(f"extends: quickstart\nname: page\n{snippet}", encoding="utf-8")
        assert validate(load(str(tmp_path / "recipe.yaml"))).recipe.name == "page"
