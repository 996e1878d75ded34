"""The table that ships is what the code says, and makes the same arguments again."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from paceline.core.registry import TABLE, Entry, register
from paceline.core.signatures import from_json, to_json
from scripts.registry_table import as_text, collect, undescribed

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
ROWS = [(kind, name) for kind, rows in SHIPPED.items() for name in rows]


@pytest.fixture(scope="module")
def collected() -> dict[str, dict[str, Any]]:
    return json.loads(json.dumps(collect()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", SHIPPED)
def test_the_table_is_what_the_code_registers(kind: str, collected: dict[str, dict[str, Any]]) -> None:
    message = "registry.json is out of date: run `make table`"
    assert SHIPPED[kind].keys() == collected[kind].keys(), message
    assert {name: row for name, row in SHIPPED[kind].items() if row != collected[kind][name]} == {}, message


def test_the_table_is_written_as_it_ships() -> None:
    assert as_text(SHIPPED) == TABLE.read_text(encoding="utf-8")


def test_there_is_something_in_the_table() -> None:
    assert len(ROWS) > 100
    assert all(SHIPPED[kind][name]["summary"] for kind, name in ROWS)


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_every_name_stands_for_something(kind: str, name: str) -> None:
    row = SHIPPED[kind][name]
    target = Entry(name, row["target"], "", lambda: from_json(name, {})).resolve()
    assert register.definitions[kind, name].target is target


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_the_table_makes_the_same_arguments_again(kind: str, name: str) -> None:
    row = SHIPPED[kind][name]
    assert to_json(from_json(name, row["arguments"], row.get("checks", ()))) == row["arguments"]
    members = row.get("library", {}).get("members", [])
    if isinstance(members, dict):
        assert {each: to_json(from_json(each, taken)) for each, taken in members.items()} == members


@pytest.mark.parametrize(("kind", "name"), [row for row in ROWS if "library" in SHIPPED[row[0]][row[1]]])
def test_names_of_libraries_are_of_the_pinned_versions(kind: str, name: str) -> None:
    library = SHIPPED[kind][name]["library"]
    pins = dict(re.findall(r"^([a-z-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert library["version"] == pins[library["distribution"]]
    assert library["version"] == metadata.version(library["distribution"]).split("+")[0]
    assert len(library["members"]) > 3


def test_every_argument_is_described() -> None:
    """By `Field(description=…)`, by a sentence of the docstring that names it in backticks, or in the script."""
    assert undescribed(collect()) == []


def test_the_recipe_reference_is_that_of_the_schema() -> None:
    """`make table` writes it. A process of its own, since other tests register parts in this one."""
    command = [sys.executable, str(ROOT / "scripts" / "recipe_reference.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "recipe-reference.md").read_text(encoding="utf-8") == printed
