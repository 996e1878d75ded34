"""The command line. Each command is imported only when it is called, so `--help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Any

from paceline import __version__
from paceline.core.errors import PacelineError, RecipeError, UsageError, naming_full_disks
from paceline.core.place import restored_variables
from paceline.core.process import flush_streams, open_missing_streams, pause_gc, print_error
from paceline.launch.environment import LAUNCHER, end_with_sweep

COMMANDS = {
    "new": "create a project with a model, a data set, a loss and a metric of your own to edit",
    "train": "train from a recipe, or resume a run",
    "eval": "evaluate a checkpoint or a weights file",
    "predict": "what a trained run predicts for new images: tables, maps, and images with predictions drawn",
    "export": "a trained model for other programs: safetensors, ExportedProgram (.pt2) and ONNX, each checked",
    "check": "try everything a run needs without training: data, one step, a checkpoint",
    "data": "inspect every sample: unreadable files, class counts, speed, contact sheet; or write a pack",
    "sample": "write a small synthetic data set and print a recipe for it",
    "show": "print the resolved recipe, the model, parameter groups, batch and learning rate",
    "eject": "write a run as one Python file without a recipe, which gives the same results",
    "plan": "say how much memory and time a run needs, with which settings it fits, and the largest micro-batch",
    "find-batch": "find the largest micro-batch that fits: planned first, then tried",
    "find-lr": "run a learning rate range test and suggest a learning rate",
    "sweep": "train a recipe with several values of its keys, and compare the runs",
    "replay": "repeat a step that was not finite, from the bundle that the run saved",
    "results": "compare the metrics of runs; write them to a CSV or XLSX table",
    "report": "write one HTML page on a run, or on several that are compared",
    "convert": "convert a weights file (.pth, .pt, .bin) to safetensors, or a configuration of Pet to a recipe",
    "recipes": "list the recipes that ship with the package, or print one",
    "schema": "print the JSON Schema of recipes, for editors",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    open_missing_streams()
    words, is_process = (sys.argv[1:], True) if arguments is None else (list(arguments), False)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as on standard error: file names may not be UTF-8
    try:
        with restored_variables():
            return _run_in_place(words, is_process)
    except PacelineError as error:
        flush_streams()
        print_error(_text(error, words))
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
    except BrokenPipeError:
        return 1
    finally:
        flush_streams()


def _run_in_place(words: list[str], is_process: bool) -> int:
    """Run as what started this process has it: a sweep, our launcher, or somebody else."""
    end_with_sweep()
    if LAUNCHER in os.environ:
        from paceline.launch.failure import run_as_worker

        return run_as_worker(lambda: _run(words, is_process), lambda error: _text(error, words))
    return _run(words, is_process)


def _text(error: PacelineError, words: list[str]) -> str:
    """The message, or the whole traceback, which ends with it."""
    return "".join(traceback.format_exception(error)).rstrip() if "--traceback" in words else str(error)


def _run(words: list[str], is_process: bool) -> int:
    options = _parse(words)
    options.arguments, options.is_process = words, is_process
    with pause_gc(), naming_full_disks():
        return _named(_module(options.command).main, options)


def _module(command: str) -> Any:
    return importlib.import_module(f"paceline.commands.{command.replace('-', '_')}")


def _named(body: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """The body's exit code; what lines of a user's raise in it is a PacelineError that names them."""
    try:
        return body(options)
    except Exception as error:
        # A field that a batch lacks, a KeyError, is the mistake of a part; what calls parts has loaded torch.
        is_explained = isinstance(error, PacelineError) and not isinstance(error, KeyError)
        if isinstance(error, RecipeError) and hasattr(options, "checked"):
            raise options.checked.located(error) from error
        if is_explained or "torch" not in sys.modules:
            raise
        from paceline.core.user_code import named_errors

        with named_errors():
            raise


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse a command line; overrides (key=value) may come anywhere after the recipe, between options too."""
    parser = _parser(next((word for word in arguments if word in COMMANDS), None))
    options, rest = parser.parse_known_args(arguments)
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    if wrong and not hasattr(options, "overrides"):
        parser.error(f"unrecognized: {' '.join(wrong)}")
    if wrong:
        what = "unknown option" if wrong[0].startswith("-") else "expected key=value, got"
        raise UsageError(f"paceline {options.command}: {what} {wrong[0]}; see paceline {options.command} --help")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _parser(named: str | None) -> argparse.ArgumentParser:
    """The parser of all commands; only the one that is named has its arguments, so that no other is imported."""
    parser = argparse.ArgumentParser("paceline", description="Train vision models from one recipe file, exactly.")
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    # What torch.distributed.launch adds; the environment says the same.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == named:
            command.add_argument(
                "--traceback", action="store_true", help="with an error, print every line that led to it"
            )
            _module(name).add_arguments(command)
    return parser
