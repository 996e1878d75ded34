"""What commands share: the user's modules, the recipe, JSON output, a progress bar."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import UsageError
from paceline.recipe.load import load
from paceline.recipe.validate import CheckedRecipe, validate

if TYPE_CHECKING:
    from rich.progress import Progress


def read_recipe(options: argparse.Namespace) -> CheckedRecipe:
    """The checked recipe of a command line, after importing what `--use` names."""
    use_modules(options.use)
    return validate(load(options.recipe, options.overrides))


def use_modules(names: list[str]) -> None:
    """Import the user's modules, so that what they register can be named."""
    if names:
        sys.path.insert(0, str(Path.cwd()))
    for name in names:
        try:
            importlib.import_module(name.removesuffix(".py").replace("/", "."))
        except ModuleNotFoundError as error:
            raise UsageError(
                f"--use {name}: {error}; it is looked for in {Path.cwd()} and among installed packages"
            ) from error


def check_writable(folder: Path) -> None:
    """Refuse, before any work, a folder in which nothing can be made."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise UsageError(f"{folder} cannot be a run directory: {existing} is a file; choose another with --out")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {existing}: {error.strerror}; choose another with --out"
        ) from error


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on standard output; of a name that is no UTF-8, what can be said of it."""
    print(json.dumps(value, indent=2, ensure_ascii=False).encode(errors="backslashreplace").decode())


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar for each split on the terminal; nothing where there is none."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    is_seen = console.is_terminal and os.environ.get("TERM") != "dumb"
    with Progress(*columns, console=console, transient=True, disable=not is_seen) as bar:
        yield bar
