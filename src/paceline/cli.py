"""The command line. Nothing is imported before it is known what is asked for, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import __version__
from paceline.core.errors import PacelineError, UsageError

_COMMANDS = {
    "train": "train from a recipe, or continue a run that was stopped",
    "eval": "measure a run's checkpoint",
    "check": "try everything a run needs, without training: data, one step, a checkpoint",
    "show": "the resolved recipe, the model, parameter groups, the batch and the learning rate",
    "find-lr": "train while the learning rate grows, and suggest one",
    "recipes": "list the recipes that ship with the package",
    "schema": "print the JSON Schema of a recipe, for editors",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code."""
    try:
        options = _parse(list(sys.argv[1:] if arguments is None else arguments))
        command = importlib.import_module(f"paceline.commands.{options.command.replace('-', '_')}")
        code: int = command.main(options)
    except PacelineError as error:
        sys.stdout.flush()
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return code


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Overrides (key=value) may stand anywhere behind the recipe, between options too."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    if wrong and not hasattr(options, "overrides"):
        parser.error(f"unrecognised: {' '.join(wrong)}")
    if wrong:
        what = "unknown option" if wrong[0].startswith("-") else "expected key=value, got"
        raise UsageError(f"paceline {options.command}: {what} {wrong[0]}; see paceline {options.command} --help")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("paceline", description="Train vision models from one recipe file, exactly.")
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    made = {name: commands.add_parser(name, help=text, description=text) for name, text in _COMMANDS.items()}
    for name in ("train", "eval", "check", "show", "find-lr"):
        _add_recipe(made[name], "RECIPE or RUN" if name == "eval" else "RECIPE")
    for name in ("eval", "check", "show", "find-lr", "recipes"):
        made[name].add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    made["train"].add_argument("--out", type=Path, help="run directory (default: runs/NAME)")
    made["train"].add_argument(
        "--from", dest="start", type=Path, metavar="CHECKPOINT", help="start from this checkpoint"
    )
    made["train"].add_argument("--fresh", action="store_true", help="start over; an earlier run is kept beside it")
    made["eval"].add_argument("--checkpoint", type=Path, help="a checkpoint (default: the run's best, else newest)")
    made["eval"].add_argument("--split", choices=("val", "test"), help="default: test if the recipe has it, else val")
    for name in ("show", "find-lr"):
        made[name].add_argument("--plot", type=Path, metavar="FILE", help="draw the curve into a PNG file")
    made["find-lr"].add_argument("--low", type=float, default=1e-6, help="the first learning rate (default: 1e-6)")
    made["find-lr"].add_argument("--high", type=float, default=10.0, help="the last (default: 10)")
    made["find-lr"].add_argument("--steps", type=int, default=100, help="updates in between (default: 100)")
    return parser


def _add_recipe(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("recipe", metavar=what, help="a .yaml or .json file, or the name of a recipe that ships")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change values, as in optimizer.lr=0.01")
    parser.add_argument("--use", action="append", default=[], metavar="MODULE", help="import a module of yours first")
