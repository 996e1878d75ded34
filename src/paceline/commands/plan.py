"""`paceline plan`: the memory and the time that a run will need, before it starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.common import add_json, add_recipe, print_json, progress_bar, recipe_file, use_modules
from paceline.core.errors import DataError, PacelineError, UsageError
from paceline.core.process import num_cores
from paceline.core.text import evenly_spaced

if TYPE_CHECKING:
    from paceline.commands.plan_report import Report
    from paceline.plan.devices import Device
    from paceline.plan.grid import Grid
    from paceline.plan.rows import Row
    from paceline.plan.surrogate import Shape
    from paceline.recipe.validate import CheckedRecipe

_LOADED = 32  # samples, to measure the loader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser)
    parser.add_argument(
        "--procs", "--devices", default="1", metavar="N,…", help="numbers of processes, one per device (default: 1)"
    )
    parser.add_argument("--measure", action="store_true", help="take real steps here; print predicted beside measured")
    parser.add_argument("--png", type=Path, metavar="FILE", help="save an image of the memory by its parts")
    add_device(parser)
    add_json(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """What a run is planned for: a device, and samples where the data is missing."""
    parser.add_argument("--device", metavar="GPU", help="plan for a GPU, such as rtx4090 (default: what is here)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="of a device: 24GiB, or a GPU; with --device, in place of its own"
    )
    parser.add_argument("--image", default="640x480", metavar="WxH", help="without the data: the size of images")
    parser.add_argument("--classes", type=int, default=100, metavar="N", help="without the data: number of classes")


def main(options: argparse.Namespace) -> int:
    """Rehearse each combination of settings on fake tensors and print what it needs."""
    use_modules(options.use, options.recipe)
    reference, shape = recipe_file(options.recipe), read_shape(options)
    processes = _processes(options.procs)
    from paceline.commands.plan_report import Report
    from paceline.plan.devices import device_at_hand
    from paceline.plan.grid import Grid, combinations, plan_rows, split_choices
    from paceline.plan.rows import Unrehearsed
    from paceline.recipe.load import load
    from paceline.recipe.validate import validate

    fixed, choices = split_choices(options.overrides)
    checked = validate(load(reference, fixed))
    device = read_device(options) or device_at_hand(max(map(int, processes)))
    settings = list(combinations({"procs": processes, **(choices or _default_choices(checked, fixed))}))
    is_cpu = device.is_cpu or checked.recipe.train.device == "cpu"
    grid = Grid(reference, fixed, device.memory, shape, is_cpu, device.is_cpu)
    speed = _measure_loader(checked) if device.speed else None
    # What a model prints must not end up between the lines of the answer.
    with redirect_stdout(sys.stderr), progress_bar() as bar:
        task = bar.add_task("plan", total=len(settings))
        results = plan_rows(grid, settings, lambda number: bar.advance(task, number))
    report = Report(checked.recipe.name, device, results, speed)
    can_measure = options.measure and any(isinstance(each, Unrehearsed) for each in results)
    if not report.rows and not can_measure:
        raise report.refused[0].kind(report.refused[0].reason)
    if options.measure:
        _measure(report, grid, options.use)
    if options.png and report.rows:
        report.save_image(options.png)
    if options.json:
        print_json(report.as_json())
        return 0
    report.print()
    _print_notes(options, checked.recipe.data.batch_size, report.rows)
    return 0


def _print_notes(options: argparse.Namespace, batch_size: int, rows: Sequence[Row]) -> None:
    """Print what the table does not show: the image, processes without samples, and assumptions about missing data."""
    if options.png:
        print(f"image: {options.png}" if rows else "image: none, since nothing could be planned")
    needed = ((int(row.settings["procs"]), int(row.settings.get("data.batch_size", batch_size))) for row in rows)
    if too_many := sorted({processes for processes, samples in needed if processes > samples}):
        many = " and ".join(f"{processes:,}" for processes in too_many)
        print(f"data.batch_size: {many} processes need at least as many samples; some would have nothing to do")
    if missing := next((row.missing for row in rows if row.missing), ""):
        print(
            f"the data is not here: images are taken to be {options.image} (--image), and classes, unless the recipe"
            f" says how many, to be {options.classes} (--classes); {missing}"
        )


def read_device(options: argparse.Namespace) -> Device | None:
    """The device of --device or --memory; with both, that GPU with so much memory for a run. None with neither."""
    from paceline.plan.devices import parse_device

    device = parse_device(options.device, "--device") if options.device else None
    memory = parse_device(options.memory) if options.memory else None
    if device is None or memory is None:
        return device or memory
    if device.speed is None or memory.speed is not None:
        raise UsageError(
            f"--device {options.device} --memory {options.memory}: expected one of them, or a GPU and a size, such as"
            " --device a100 --memory 20GiB"
        )
    return replace(device, memory=memory.memory)


def read_shape(options: argparse.Namespace) -> Shape:
    """What samples are where the data is missing: --image and --classes."""
    width, separator, height = options.image.partition("x")
    if not (separator and width.isdecimal() and height.isdecimal() and int(width) * int(height)):
        raise UsageError(f"--image {options.image}: expected width and height, such as 640x480")
    if options.classes < 1:
        raise UsageError(f"--classes {options.classes}: expected 1 or more")
    from paceline.plan.surrogate import Shape

    return Shape(int(height), int(width), options.classes)


def _processes(written: str) -> list[str]:
    if not all(each.isdecimal() and int(each) > 0 for each in written.split(",")):
        raise UsageError(f"--procs (or --devices) {written}: expected numbers of processes, such as 8 or 1,2,8")
    return written.split(",")


def _default_choices(checked: CheckedRecipe, fixed: Sequence[str] = ()) -> dict[str, list[str]]:
    """The settings to compare by default: precisions, and activation checkpointing off and on."""
    given = {override.partition("=")[0] for override in fixed}
    train = checked.recipe.train
    choices: dict[str, list[str]] = {
        "train.precision": list(dict.fromkeys([train.precision, "fp32", "bf16"])),
        "train.activation_checkpointing": list(dict.fromkeys([train.activation_checkpointing.name, "none", "blocks"])),
    }
    return {key: values for key, values in choices.items() if key not in given}


def _measure_loader(checked: CheckedRecipe) -> float | None:
    """The samples of the training data that all cores of this machine load in a second; None without the data."""
    import torch

    from paceline.core.world import World
    from paceline.data.loader_profile import loading_speed
    from paceline.recipe.build import Builder
    from paceline.recipe.build_data import make_split_loader

    builder = Builder(checked, World(0, 1, 0, torch.device("cpu")), trains=False)
    try:
        loader = make_split_loader(builder, "train", checked.recipe.data.train)
        ids = evenly_spaced(len(loader.dataset), min(_LOADED, len(loader.dataset)))
        return loading_speed(loader, ids, num_cores())
    except DataError:
        return None


def _measure(report: Report, grid: Grid, modules: list[str]) -> None:
    """Take real steps of each row that fits or that could not be rehearsed, one after the other."""
    from paceline.commands.measure_row import Trial, measure_row
    from paceline.plan.rows import Row, Unrehearsed

    with progress_bar() as bar:
        task = bar.add_task("measure", total=len(report.results))
        for place, row in enumerate(report.results):
            if isinstance(row, Row) and not row.fits(report.device.memory):
                report.measured[place] = "does not fit"
            elif isinstance(row, Row | Unrehearsed):
                try:
                    report.measured[place] = measure_row(Trial.of(grid, row, modules))
                except PacelineError as error:
                    report.measured[place] = str(error)
            bar.advance(task)
