"""Run directories: where they are, and the recipe in each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError, UsageError
from paceline.loggers.results import About
from paceline.recipe.document import read_document

_DEEPEST = 4
_MOVED_ASIDE = re.compile(r".*~\d+")


def find_runs(named: Sequence[Path]) -> list[tuple[Path, bool]]:
    """The selected run directories without duplicates, and whether each was named itself."""
    found: dict[str, tuple[Path, bool]] = {}
    for place in named or [Path("runs")]:
        if not place.is_dir():
            hint = "" if named else ": train something first, or name a run directory"
            raise UsageError(f"{place} is not a folder{hint}")
        inner = [place] if is_run(place) else list(_inside(place, 1))
        if not inner:
            raise UsageError(f"{place} is not a run directory and contains none")
        for folder in inner:
            found.setdefault(os.path.realpath(folder), (folder, folder == place))
    return list(found.values())


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return (folder / "recipe.yaml").is_file() and any((folder / n).is_file() for n in ("status.json", "metrics.jsonl"))


def _inside(folder: Path, depth: int) -> Iterator[Path]:
    """The runs in a folder, sorted by name, without those that `--fresh` renamed."""
    try:
        inner = sorted((each for each in folder.iterdir() if each.is_dir() and not each.is_symlink()), key=_by_numbers)
    except OSError:
        return
    for each in inner:
        if each.name.startswith(".") or _MOVED_ASIDE.fullmatch(each.name):
            continue
        if is_run(each):
            yield each
        elif depth < _DEEPEST:
            yield from _inside(each, depth + 1)


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """A sort key that puts fold-10 after fold-9."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"([0-9]+)", path.name)]


def read_recipe(folder: Path) -> tuple[About, dict[str, Any]]:
    """Name, task and model of a run, and its resolved recipe."""
    path = folder / "recipe.yaml"
    tree = read_document(path, str(path)).tree
    words = [_name_of(tree.get(key)) if isinstance(tree, dict) else None for key in About._fields]
    if None in words:
        raise DataError(f"{path}: is not the recipe of a run: expected name, task and model")
    return About(*(str(word) for word in words)), tree


def _name_of(part: Any) -> str | None:
    name = part.get("name") if isinstance(part, dict) else part
    return name if isinstance(name, str) else None


def data_of(tree: dict[str, Any], split: str) -> str:
    """The data set of a split and the folder that it is in: folds of one folder are the same data."""
    part: Any = tree.get("data")
    for word in split.split(".", 1):
        part = part.get(word) if isinstance(part, dict) else None
    if not isinstance(part, dict):
        return ""
    file = part.get("file")
    place = part.get("root") or (os.path.dirname(file) if isinstance(file, str) else None)  # noqa: PTH120
    return " ".join(str(word) for word in (part.get("dataset"), place) if word)


def settings_of(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key; of a list of parts their names, and below it each part's values by its name."""
    if key == "use" and isinstance(tree, list):
        yield key, "+".join(_module_name(each) for each in tree)
    elif isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from settings_of(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list) and tree and all(_name_of(part) for part in tree):
        yield key, "+".join(str(_name_of(part)) for part in tree)
        for part in tree:
            yield from settings_of(part, f"{key}.{_name_of(part)}")
    else:
        yield key, tree


def _module_name(module: Any) -> str:
    """The name of a user's file, and the beginning of its checksum."""
    recorded = module if isinstance(module, dict) else {}
    return f"{Path(str(recorded.get('file', module))).name} {str(recorded.get('sha256', ''))[:6]}".strip()
