"""Shared by commands: importing user modules, reading recipes, JSON output, tables, a progress bar."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import RecipeError
from paceline.core.extras import missing_extra
from paceline.launch.environment import find_place
from paceline.recipe.document import Document
from paceline.recipe.load import load, run_recipe, shipped_recipes
from paceline.recipe.user_modules import import_modules, read_checked
from paceline.recipe.validate import CheckedRecipe

if TYPE_CHECKING:
    from rich.progress import Progress


def read_recipe(options: argparse.Namespace) -> CheckedRecipe:
    """The checked recipe of a command line, or of the run that it names, after importing the user's modules."""
    is_run = run_directory(options.recipe) is not None
    checked = options.checked = read_checked(recipe_file(options.recipe), options.overrides, options.use, is_run)
    print_notes(checked)
    return checked


def print_notes(checked: CheckedRecipe) -> None:
    """Print what was dropped from the recipe, and modules that changed, once for all processes."""
    _print(checked.notes)


def _print(notes: Sequence[str]) -> None:
    if find_place(os.environ) is None:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)


def check_extras(checked: CheckedRecipe) -> None:
    """Raise RecipeError if packages that training by this recipe needs are not installed."""
    logging, data = checked.recipe.logging, checked.recipe.data
    wanted = [(f"logging.{name}", name, "or set it to null") for name in ("wandb", "mlflow") if getattr(logging, name)]
    if (logging.results or "").endswith(".xlsx"):
        wanted.append(("logging.results", "excel", "or name a .csv file"))
    if data.train.dataset.startswith("video_"):
        wanted.append(("data.train.dataset", "video", "which reads videos"))
    found = [(key, missing_extra(extra), cure) for key, extra, cure in wanted]
    if problems := [f"{checked.locate(key)}: {missing}, {cure}" for key, missing, cure in found if missing]:
        raise RecipeError(problems)


def recipe_file(reference: str) -> str:
    """The recipe that a command line names: itself, or that of a run directory."""
    run = run_directory(reference)
    return str(run / "recipe.yaml") if run else reference


def run_directory(reference: str) -> Path | None:
    """The run directory that a command line names in place of a recipe; None if it names a recipe."""
    place = Path(reference)
    if not place.is_dir() or (reference in shipped_recipes() and not (place / "recipe.yaml").is_file()):
        return None
    return run_recipe(place).parent


def use_modules(names: Sequence[str], reference: str) -> None:
    """Import the user's modules: those of `--use`, and those of the recipe or run that a command line names."""
    document: Document | None = None
    with suppress(RecipeError):  # reported when the recipe is checked
        document = load(recipe_file(reference))
    _print(import_modules(names, document, run_directory(reference) is not None).notes)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on standard output; names that are not UTF-8 are escaped."""
    print(json.dumps(value, indent=2, ensure_ascii=False).encode(errors="backslashreplace").decode())


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar for each split; nothing without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    is_seen = console.is_terminal and os.environ.get("TERM") != "dumb"
    with Progress(*columns, console=console, transient=True, disable=not is_seen) as bar:
        yield bar
