"""The command line. Each command is imported only when it is called, so `--help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path

from paceline import __version__
from paceline.core.errors import PacelineError, RecipeError, UsageError, naming_full_disks
from paceline.core.process import flush_streams, open_missing_streams, pause_gc, print_error
from paceline.launch.environment import LAUNCHER, end_with_sweep
from paceline.launch.variables import restored_variables

_COMMANDS = {
    "new": "create a project with a model, a data set, a loss and a metric of your own to edit",
    "train": "train from a recipe, or resume a run",
    "eval": "evaluate a checkpoint or a weights file",
    "predict": "what a trained run predicts for new images: tables, maps, and images with predictions drawn",
    "export": "a trained model for other programs: safetensors, ExportedProgram (.pt2) and ONNX, each checked",
    "check": "try everything a run needs without training: data, one step, a checkpoint",
    "data": "inspect every sample: unreadable files, class counts, speed, contact sheet; or write a pack",
    "sample": "write a small synthetic data set and print a recipe for it",
    "show": "print the resolved recipe, the model, parameter groups, batch and learning rate",
    "plan": "say how much memory and time a run needs, with which settings it fits, and the largest micro-batch",
    "find-batch": "find the largest micro-batch that fits: planned first, then tried",
    "find-lr": "run a learning rate range test and suggest a learning rate",
    "sweep": "train a recipe with several values of its keys, and compare the runs",
    "replay": "repeat a step that was not finite, from the bundle that the run saved",
    "results": "compare the metrics of runs; write them to a CSV or XLSX table",
    "report": "write one HTML page on a run, or on several that are compared; or watch a run in the browser",
    "convert": "convert a weights file (.pth, .pt, .bin) to safetensors, or a configuration of Pet to a recipe",
    "recipes": "list the recipes that ship with the package, or print one",
    "slurm": "print a Slurm job script that requeues itself at the time limit",
    "schema": "print the JSON Schema of recipes, for editors",
}
_SAMPLE_TASKS = ("classification", "detection", "keypoints", "saliency", "segmentation", "video")


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
        from paceline.launch.worker import run_as_worker

        return run_as_worker(lambda: _run(words, is_process), lambda error: _text(error, words))
    return _run(words, is_process)


def _text(error: PacelineError, words: list[str]) -> str:
    """The message, or the whole traceback, which ends with it."""
    return "".join(traceback.format_exception(error)).rstrip() if "--traceback" in words else str(error)


def _run(words: list[str], is_process: bool) -> int:
    options = _parse(words)
    options.arguments, options.is_process = words, is_process
    with pause_gc(), naming_full_disks():
        command = importlib.import_module(f"paceline.commands.{options.command.replace('-', '_')}")
        code: int = _named(command.main, options)
    return code


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
    for each in made.values():
        each.add_argument("--traceback", action="store_true", help="with an error, print every line that led to it")
    for name in ("train", "eval", "check", "data", "show", "plan", "find-batch", "find-lr", "sweep", "slurm"):
        _add_recipe(made[name], "RECIPE or RUN", is_required=name != "data")
    made["replay"].add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder runs/NAME/replay/step-…")
    made["replay"].add_argument("--rank", type=int, default=0, help="the rank to repeat (default: 0)")
    made["replay"].add_argument("--use", action="append", default=[], metavar="MODULE", help="import a module first")
    for name in (
        "eval",
        "export",
        "check",
        "data",
        "show",
        "plan",
        "find-batch",
        "find-lr",
        "sweep",
        "recipes",
        "replay",
    ):
        made[name].add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    made["schema"].add_argument("--markdown", action="store_true", help="print a page for readers instead")
    made["recipes"].add_argument("name", nargs="?", metavar="NAME", help="print this recipe (default: list all)")
    made["train"].add_argument("--out", type=Path, help="run directory (default: runs/NAME)")
    made["train"].add_argument(
        "--from", dest="start", type=Path, metavar="CHECKPOINT", help="start from this checkpoint"
    )
    made["train"].add_argument("--fresh", action="store_true", help="start over; the earlier run is renamed and kept")
    made["train"].add_argument(
        "--accept-data", action="store_true", help="resume although the data changed; prints what changed"
    )
    made["eval"].add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="a checkpoint or a weights file (default: model.weights=… of this command, else the run's best checkpoint,"
        " else its newest, else the recipe's model.weights)",
    )
    made["eval"].add_argument(
        "--split", metavar="SPLIT", help="val, test, or test.NAME (default: test if the recipe has it, else val)"
    )
    _add_predict(made["predict"])
    _add_export(made["export"])
    for name in ("train", "eval", "predict"):
        _add_processes(made[name])
    _add_data(made["data"])
    _add_sample(made["sample"])
    _add_new(made["new"])
    _add_results(made["results"])
    _add_report(made["report"])
    _add_convert(made["convert"])
    _add_sweep(made["sweep"])
    _add_slurm(made["slurm"])
    for name in ("show", "find-lr"):
        made[name].add_argument("--plot", type=Path, metavar="FILE", help="save the curve as a PNG file")
    made["find-lr"].add_argument("--low", type=float, default=1e-6, help="lowest learning rate (default: 1e-6)")
    made["find-lr"].add_argument("--high", type=float, default=10.0, help="highest learning rate (default: 10)")
    made["find-lr"].add_argument("--steps", type=int, default=100, metavar="N", help="number of steps (default: 100)")
    _add_plan(made["plan"])
    made["find-batch"].add_argument(
        "--procs", type=int, default=1, metavar="N", help="processes, each with a device of its own (default: 1)"
    )
    for name in ("plan", "find-batch"):
        _add_device(made[name])
    return parser


def _add_recipe(parser: argparse.ArgumentParser, what: str, is_required: bool = True) -> None:
    help_text = "a .yaml or .json file, the name of a recipe that ships, or a run directory"
    parser.add_argument("recipe", metavar=what, nargs=None if is_required else "?", help=help_text)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override values, such as optimizer.lr=0.01")
    parser.add_argument("--use", action="append", default=[], metavar="MODULE", help="import your own module first")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--procs", "--devices", default="1", metavar="N,…", help="numbers of processes, one per device (default: 1)"
    )
    parser.add_argument("--measure", action="store_true", help="take real steps here; print predicted beside measured")
    parser.add_argument("--png", type=Path, metavar="FILE", help="save an image of the memory by its parts")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="GPU", help="plan for a GPU, such as rtx4090 (default: what is here)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="of a device: 24GiB, or a GPU; with --device, in place of its own"
    )
    parser.add_argument("--image", default="640x480", metavar="WxH", help="without the data: the size of images")
    parser.add_argument("--classes", type=int, default=100, metavar="N", help="without the data: number of classes")


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
    parser.add_argument(
        "--score",
        type=float,
        metavar="X",
        help="least score of detections, written and drawn (default: all are written, the 20 best from 0.3 on drawn)",
    )
    parser.add_argument("--use", action="append", default=[], metavar="MODULE", help="import your own module first")


def _add_export(parser: argparse.ArgumentParser) -> None:
    formats = ("safetensors", "pt2", "onnx")
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a trained run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where files are written (default: RUN/export)")
    parser.add_argument("--format", nargs="+", choices=formats, help="which files are written (default: all)")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "fp16", "bf16"),
        default="fp32",
        help="of the weights in model.safetensors (default: fp32); graphs are always fp32",
    )
    parser.add_argument(
        "--input",
        choices=("normalized", "float", "uint8"),
        default="normalized",
        help="what graphs take: normalized images (default), or pixels from 0 to 1 or of uint8, normalized inside",
    )
    parser.add_argument(
        "--samples", type=Path, nargs="+", metavar="INPUT", help="what files are checked on (default: the run's data)"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="default: the run's best, else its newest")
    parser.add_argument("--average", action="store_true", help="use the average of the weights (train.averaging)")
    parser.add_argument("--use", action="append", default=[], metavar="MODULE", help="import your own module first")


def _add_processes(parser: argparse.ArgumentParser) -> None:
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


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--split", metavar="SPLIT", help="train, val, test or test.NAME (default: all in the recipe)")
    parser.add_argument("--clear-cache", action="store_true", help="remove all cached indexes; needs no recipe")
    parser.add_argument("--limit", type=int, metavar="N", help="inspect N evenly spaced samples of each split")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="file of the contact sheet (default: data-NAME.png)")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write the samples into a pack instead")
    parser.add_argument(
        "--size", metavar="N or HxW", help="size of images in the pack: shorter side, or height and width"
    )


def _add_sample(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind",
        choices=_SAMPLE_TASKS,
        help="the task",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--number", type=int, default=64, metavar="N", help="number of samples (default: 64)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="random seed (default: 0)")


def _add_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--task",
        choices=(*_SAMPLE_TASKS, "masked_autoencoder"),
        default="classification",
        help="the task (default: classification)",
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="runs, or folders of them (default: runs)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="update the rows of a .csv or .xlsx file")
    parser.add_argument("--split", metavar="SPLIT", help="val, test, or test.NAME (default: all)")
    parser.add_argument("--best", action="store_true", help="metrics of the best checkpoint (default: the last one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs, or folders of them")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="an .html file (default: RUN/report.html, of several runs report.html)"
    )


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to read; nothing in it is executed")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: FILE with the extension .safetensors; a recipe is printed"
    )
    parser.add_argument("--key", help="where the file holds the tensors, such as net_state (default: the usual keys)")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), help="round float tensors to half precision")
    parser.add_argument("--max-gb", type=float, default=20.0, metavar="N", help="refuse larger files (default: 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, metavar="N", help="draw N random trials (default: all combinations)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random trials (default: 0)")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: 1; with --slurm: all)")
    parser.add_argument("--procs", type=int, metavar="N", help="processes of each run, as for train")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of all runs (default: runs/NAME-sweep)")
    parser.add_argument("--retry", action="store_true", help="start failed runs again too")
    parser.add_argument("--slurm", action="store_true", help="write a Slurm job array instead of running anything")
    parser.add_argument("--time", metavar="HH:MM:SS", help="with --slurm: time limit of one job")
    parser.add_argument("--partition", metavar="NAME", help="with --slurm: the partition to run on")


def _add_slurm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument("--procs", type=int, default=1, metavar="N", help="processes per machine (default: 1)")
    parser.add_argument("--time", metavar="HH:MM:SS", help="time limit of one job")
    parser.add_argument("--partition", metavar="NAME", help="the partition to run on")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the script here (default: standard output)")
