"""Shared by commands: arguments, recipes and modules of a command line, JSON output, a progress bar.

What reads recipes is imported where it is called, so that `paceline COMMAND --help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import RecipeError, missing_extra
from paceline.launch.environment import find_place

if TYPE_CHECKING:
    from rich.progress import Progress

    from paceline.recipe.document import Document
    from paceline.recipe.validate import CheckedRecipe


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """RECIPE or RUN with overrides, and `--use`."""
    help_text = "a .yaml or .json file, the name of a recipe that ships, or a run directory"
    parser.add_argument("recipe", metavar="RECIPE or RUN", help=help_text)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override values, such as optimizer.lr=0.01")
    add_use(parser)


def add_trained_run(parser: argparse.ArgumentParser) -> None:
    """RUN, the checkpoint and the weights of it that are meant, and `--use`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a trained run")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="default: the run's best, else its newest")
    parser.add_argument("--average", action="store_true", help="use the average of the weights (train.averaging)")
    add_use(parser)


def add_use(parser: argparse.ArgumentParser) -> None:
    """`--use MODULE`."""
    parser.add_argument("--use", action="append", default=[], metavar="MODULE", help="import your own module first")


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def add_processes(parser: argparse.ArgumentParser) -> None:
    """The processes and machines that a command starts."""
    group = parser.add_argument_group("processes")
    group.add_argument(
        "--procs", type=int, metavar="N", help="processes on this machine (default: one per GPU, else 1)"
    )
    group.add_argument("--nodes", metavar="MIN[:MAX]", help="number of machines; start the same command on each")
    group.add_argument("--rendezvous", metavar="HOST:PORT", help="the address of one of the machines")
    group.add_argument(
        "--rendezvous-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for the other machines (default: 60)",
    )
    group.add_argument("--restarts", type=int, default=3, metavar="N", help="restarts after a crash (default: 3)")


def read_recipe(options: argparse.Namespace) -> CheckedRecipe:
    """The checked recipe of a command line, or of the run that it names, after importing the user's modules."""
    from paceline.recipe.user_modules import read_checked

    is_run = run_directory(options.recipe) is not None
    checked = options.checked = read_checked(recipe_file(options.recipe), options.overrides, options.use, is_run)
    print_notes(checked.notes)
    return checked


def print_notes(notes: Sequence[str]) -> None:
    """Print what was dropped from a recipe, and modules that changed, once for all processes."""
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
    from paceline.recipe.load import run_recipe, shipped_recipes

    place = Path(reference)
    if not place.is_dir() or (reference in shipped_recipes() and not (place / "recipe.yaml").is_file()):
        return None
    return run_recipe(place).parent


def use_modules(names: Sequence[str], reference: str) -> None:
    """Import the user's modules: those of `--use`, and those of the recipe or run that a command line names."""
    from paceline.recipe.load import load
    from paceline.recipe.user_modules import import_modules

    document: Document | None = None
    with suppress(RecipeError):  # reported when the recipe is checked
        document = load(recipe_file(reference))
    print_notes(import_modules(names, document, run_directory(reference) is not None).notes)


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
