"""The command line. Nothing is imported before it is known what is asked for, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

from paceline import __version__
from paceline.core.errors import PacelineError, UsageError, naming_full_disks
from paceline.core.process import flush_streams, open_missing_streams, pause_gc, print_error, wait_passively
from paceline.launch.environment import LAUNCHER

_COMMANDS = {
    "train": "train from a recipe, or continue a run that was stopped",
    "eval": "measure a run's checkpoint",
    "predict": "what a trained run predicts for new images: tables, maps, and images with predictions drawn",
    "check": "try everything a run needs, without training: data, one step, a checkpoint",
    "data": "look at every sample: what cannot be read, what there is, how fast it loads, a contact sheet; or pack it",
    "sample": "write a small synthetic data set, and print how a recipe reads it",
    "show": "the resolved recipe, the model, parameter groups, the batch and the learning rate",
    "find-lr": "train while the learning rate grows, and suggest one",
    "replay": "do a step again that was not finite, from the bundle that the run left",
    "results": "compare what runs reached, and keep it in a CSV or XLSX table",
    "convert": "rewrite a .pth, .pt or .bin file of weights as safetensors",
    "recipes": "list the recipes that ship with the package",
    "slurm": "write a job script for Slurm that goes on after the time limit",
    "schema": "print the JSON Schema of a recipe, for editors",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code."""
    open_missing_streams()
    wait_passively()
    words, is_process = (sys.argv[1:], True) if arguments is None else (list(arguments), False)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: names of files may be no UTF-8
    try:
        if LAUNCHER in os.environ:
            from paceline.launch.worker import run_as_worker

            return run_as_worker(lambda: _run(words, is_process))
        return _run(words, is_process)
    except PacelineError as error:
        flush_streams()
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
    except BrokenPipeError:
        return 1
    finally:
        flush_streams()


def _run(words: list[str], is_process: bool) -> int:
    options = _parse(words)
    options.arguments, options.is_process = words, is_process
    with pause_gc(), naming_full_disks():
        command = importlib.import_module(f"paceline.commands.{options.command.replace('-', '_')}")
        code: int = command.main(options)
    return code


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Overrides (key=value) may stand anywhere behind the recipe, between options too."""
    parser = _parser()
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("paceline", description="Train vision models from one recipe file, exactly.")
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    # What torch.distributed.launch adds; the environment says the same.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    made = {name: commands.add_parser(name, help=text, description=text) for name, text in _COMMANDS.items()}
    for name in ("train", "eval", "check", "data", "show", "find-lr", "slurm"):
        _add_recipe(made[name], "RECIPE or RUN")
    made["replay"].add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder runs/NAME/replay/step-…")
    made["replay"].add_argument("--rank", type=int, default=0, help="whose part of the step (default: 0)")
    made["replay"].add_argument("--use", action="append", default=[], metavar="MODULE", help="import a module first")
    for name in ("eval", "check", "data", "show", "find-lr", "recipes", "replay"):
        made[name].add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    made["train"].add_argument("--out", type=Path, help="run directory (default: runs/NAME)")
    made["train"].add_argument(
        "--from", dest="start", type=Path, metavar="CHECKPOINT", help="start from this checkpoint"
    )
    made["train"].add_argument("--fresh", action="store_true", help="start over; an earlier run is kept beside it")
    made["train"].add_argument(
        "--accept-data", action="store_true", help="continue although the data is not what it was; says what changed"
    )
    made["eval"].add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="a checkpoint or a weights file (default: the run's best checkpoint, else its newest, else model.weights)",
    )
    made["eval"].add_argument(
        "--split", metavar="SPLIT", help="val, test, or test.NAME (default: test if the recipe has it, else val)"
    )
    _add_predict(made["predict"])
    for name in ("train", "eval", "predict"):
        _add_processes(made[name])
    _add_data(made["data"])
    _add_sample(made["sample"])
    _add_results(made["results"])
    _add_convert(made["convert"])
    _add_slurm(made["slurm"])
    for name in ("show", "find-lr"):
        made[name].add_argument("--plot", type=Path, metavar="FILE", help="draw the curve into a PNG file")
    made["find-lr"].add_argument("--low", type=float, default=1e-6, help="the first learning rate (default: 1e-6)")
    made["find-lr"].add_argument("--high", type=float, default=10.0, help="the last (default: 10)")
    made["find-lr"].add_argument("--steps", type=int, default=100, help="steps in between (default: 100)")
    return parser


def _add_recipe(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "recipe", metavar=what, help="a .yaml or .json file, the name of a recipe that ships, or a run directory"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change values, as in optimizer.lr=0.01")
    parser.add_argument("--use", action="append", default=[], metavar="MODULE", help="import a module of yours first")


def _add_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a trained run")
    parser.add_argument(
        "inputs", type=Path, nargs="+", metavar="INPUT", help="images, videos, folders of them, or lists (.txt, .csv)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where predictions are written")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="default: the run's best, else its newest")
    parser.add_argument("--average", action="store_true", help="use the average of the weights (train.averaging)")
    parser.add_argument("--tta", action="store_true", help="average over each image and its mirror image")
    parser.add_argument("--no-images", dest="images", action="store_false", help="draw no images")
    parser.add_argument("--use", action="append", default=[], metavar="MODULE", help="import a module of yours first")


def _add_processes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes")
    group.add_argument(
        "--procs", type=int, metavar="N", help="processes on this machine (default: one per GPU, else 1)"
    )
    group.add_argument("--nodes", metavar="MIN[:MAX]", help="machines; the same command is started on each")
    group.add_argument("--rendezvous", metavar="HOST:PORT", help="where the machines meet: the address of one of them")
    group.add_argument(
        "--rendezvous-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for them (default: 60)",
    )
    group.add_argument(
        "--restarts", type=int, default=3, metavar="N", help="how often to start again after a crash (default: 3)"
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split", metavar="SPLIT", help="train, val, test or test.NAME (default: all that the recipe has)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="look at N samples of each split, evenly spread")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="the contact sheet (default: data-NAME.png)")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write the samples into a pack instead")
    parser.add_argument(
        "--size", metavar="N or HxW", help="resize to this shorter side, or height and width, in the pack"
    )


def _add_sample(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("detection", "saliency", "segmentation", "video"), help="which task it is for")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--number", type=int, default=64, metavar="N", help="how many samples in all (default: 64)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="what is drawn (default: 0)")


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories, or folders of them (runs)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="bring the rows of a .csv or .xlsx file up to date")
    parser.add_argument("--split", metavar="SPLIT", help="val, test, or test.NAME (default: all)")
    parser.add_argument("--best", action="store_true", help="the best checkpoints' metrics (default: the last ones)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to read; nothing in it is executed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: FILE with the ending .safetensors")
    parser.add_argument("--key", help="where the file holds the tensors, such as net_state (default: the usual keys)")
    parser.add_argument("--max-gb", type=float, default=20.0, metavar="N", help="refuse larger ones (default: 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_slurm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument("--procs", type=int, default=1, metavar="N", help="processes on each machine (default: 1)")
    parser.add_argument("--time", metavar="HH:MM:SS", help="time limit of one part of the run")
    parser.add_argument("--partition", metavar="NAME", help="where to run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the script here (default: standard output)")
