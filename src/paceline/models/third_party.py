"""The names that timm and torchvision know, from a table that ships with the package, so that neither is imported.

`python -m paceline.models.third_party` writes the table anew from the installed versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("names.json")


def members_of(library: str) -> Callable[[], list[str]]:
    """A function that gives the library's model names."""
    return lambda: list(_table()[library]["names"])


def other_version_of(library: str) -> Callable[[], bool]:
    """A function that tells whether another version than the table's is installed, whose names may differ."""
    return lambda: _installed(library) != _table()[library]["version"]


def collect() -> dict[str, Any]:
    """The table as the installed libraries give it."""
    from paceline.models.torchvision_ops import import_torchvision

    torchvision = import_torchvision()
    import timm

    names = {"timm": timm.list_models(), "torchvision": torchvision.models.list_models()}
    return {library: {"version": _installed(library), "names": sorted(found)} for library, found in names.items()}


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def _installed(library: str) -> str:
    return metadata.version(library).partition("+")[0]


if __name__ == "__main__":
    TABLE.write_text(json.dumps(collect(), indent=0) + "\n", encoding="utf-8")
