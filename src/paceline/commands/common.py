"""Shared by commands: importing user modules, reading recipes, JSON output, tables, a progress bar."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.core.class_metrics import HEADER, split_classes, summarize
from paceline.core.errors import RecipeError, UsageError
from paceline.core.extras import missing_extra
from paceline.core.text import doubled_loss, format_metric
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


def command_line(command: str, run: Path) -> str:
    """The words that run a command on a run directory, which knows the modules that it uses."""
    return shlex.join(["paceline", command, str(run)])


def check_writable(folder: Path) -> None:
    """Raise UsageError if nothing can be created in a folder."""
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
    """Print one JSON object on standard output; names that are not UTF-8 are escaped."""
    print(json.dumps(value, indent=2, ensure_ascii=False).encode(errors="backslashreplace").decode())


def terminal_width(stream: TextIO) -> int | None:
    """The width of the terminal behind a stream, or COLUMNS; None if neither is known."""
    asked = os.environ.get("COLUMNS", "")
    return shutil.get_terminal_size().columns if stream.isatty() or asked.isdecimal() else None


def table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], num_words: int = 1, width: int | None = None
) -> list[str]:
    """Format rows under a header; columns beyond `width` continue in another table below.

    The first column is repeated there.
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines: list[str] = []
    left = list(range(1, len(header)))
    while left or not lines:
        columns, used = [0], widths[0]
        while left and (used + 2 + widths[left[0]] <= (width or sys.maxsize) or len(columns) == 1):
            used += 2 + widths[left[0]]
            columns.append(left.pop(0))
        lines += [""] * bool(lines)
        for row in [header, *rows]:
            cells = [f"{row[i]:<{widths[i]}}" if i < num_words else f"{row[i]:>{widths[i]}}" for i in columns]
            lines.append("  ".join(cells).rstrip())
    return lines


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_words: int = 1) -> None:
    """Print `table_lines`, as wide as the terminal."""
    print("\n".join(table_lines(header, rows, num_words, terminal_width(sys.stdout))))


Table = tuple[list[str], list[list[str]]]
"""The header and the rows."""


def metrics_tables(splits: Mapping[str, Mapping[str, float]], main_metric: str | None = None) -> list[Table]:
    """A row for each split, a column for each metric, the main one first; metrics of many classes in further tables."""
    doubled = {doubled_loss(metrics) for metrics in splits.values()}
    hidden = doubled if len(doubled) == 1 else set()
    names, by_class = split_classes(n for metrics in splits.values() for n in metrics if n not in hidden)
    names.sort(key=lambda name: name != main_metric)
    rows = [
        [split.removeprefix("test."), *(format_metric(metrics[name]) if name in metrics else "" for name in names)]
        for split, metrics in splits.items()
    ]
    named = {split.removeprefix("test."): metrics for split, metrics in splits.items()}
    return [(["", *names], rows), *class_tables(named, by_class)]


def class_tables(rows: Mapping[str, Mapping[str, float | None]], by_class: Sequence[str]) -> list[Table]:
    """For each of these metrics a table over its classes, with the rows that have them."""
    tables = []
    for metric in by_class:
        found = {name: summarize(metrics, metric) for name, metrics in rows.items()}
        tables.append(([f"{metric}.*", *HEADER], [[name, *cells] for name, cells in found.items() if cells[0]]))
    return tables


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
