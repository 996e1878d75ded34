"""`paceline find-batch`: the largest micro-batch that fits, planned first and tried second."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from paceline.commands.common import add_json, add_recipe, print_json, recipe_file, use_modules
from paceline.commands.plan import add_device, read_device, read_shape
from paceline.core.errors import UsageError
from paceline.core.process import free_memory
from paceline.core.text import pluralize

if TYPE_CHECKING:
    from paceline.plan.devices import Device
    from paceline.plan.rows import Row

_SAFE = 0.8  # of a machine's free memory: other programs need some, and a process is more than its tensors
_MOST_TRIALS = 6
_LESS = 0.75  # of the samples of a trial that got no memory


class Tried(NamedTuple):
    """A micro-batch that was tried."""

    micro_batch_size: int
    tensor_bytes: int | None
    """None if there was not enough memory."""
    fits: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser)
    parser.add_argument(
        "--procs", type=int, default=1, metavar="N", help="processes, each with a device of its own (default: 1)"
    )
    add_device(parser)
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Print the largest micro-batch; 0 also if there is none."""
    use_modules(options.use, options.recipe)
    if options.procs < 1:
        raise UsageError(f"--procs {options.procs}: expected 1 or more")
    shape, reference = read_shape(options), recipe_file(options.recipe)
    from paceline.commands.measure_row import OutOfMemoryError, Trial, measure_row
    from paceline.plan.grid import Grid, plan_rows
    from paceline.plan.rows import Refused

    device = read_device(options) or _device_at_hand(options.procs)
    grid = Grid(reference, options.overrides, device.memory, shape, device.is_cpu)
    with redirect_stdout(sys.stderr):  # what a model prints is no part of the answer
        (row,) = plan_rows(grid, [{"procs": str(options.procs)}])
    if isinstance(row, Refused):
        raise row.kind(row.reason)
    planned = row.largest_micro_batch or 0
    reason = _why_not_tried(device.memory * options.procs, planned)
    if not options.json:
        print(f"{device.name}: {device.memory / 2**20:,.0f} MiB for each of {pluralize(row.processes, 'process')}")
        print(f"planned: a micro-batch of {pluralize(planned, 'sample')}; {row.step.name}", flush=True)

    def take(size: int) -> int | None:
        print(f"trying {pluralize(size, 'sample')} …", file=sys.stderr, flush=True)
        try:  # evaluation has a batch size of its own
            return measure_row(replace(Trial.of(grid, row, options.use, size), steps=1, evaluates=False)).tensor_bytes
        except OutOfMemoryError:
            return None

    trials = [] if reason else try_sizes(planned, device.memory, take)
    largest = planned if reason else max((each.micro_batch_size for each in trials if each.fits), default=0)
    if options.json:
        print_json(
            {
                "largest_micro_batch": largest,
                "planned": planned,
                "not_tried": reason or None,
                "device": device.name,
                "memory": device.memory,
                "processes": options.procs,
                "phase": row.step.name,
                "largest_evaluation_batch": row.largest_evaluation_batch,
                "trials": [each._asdict() for each in trials],
            }
        )
    else:
        _print_result(row, trials, reason, largest, device.memory)
    return 0


def _device_at_hand(processes: int) -> Device:
    from paceline.plan.devices import device_at_hand

    device = device_at_hand(processes)
    return replace(device, memory=round(_SAFE * device.memory) // processes) if device.is_cpu else device


def _why_not_tried(needed: int, planned: int) -> str:
    """Why the plan cannot be tried here; empty if it can."""
    import torch

    if not planned:
        return "not even one sample fits"
    if not torch.cuda.is_available() and needed > free_memory():
        return f"this machine has {free_memory() / 2**20:,.0f} MiB of free memory"
    return ""


def try_sizes(planned: int, limit: int, take: Callable[[int], int | None]) -> list[Tried]:
    """What was tried: the planned size, and smaller ones until one fits.

    `take` gives the bytes that a step of so many samples takes, the most of all processes; None if one of them does
    not get them.
    """
    trials, size = list[Tried](), planned
    while size and len(trials) < _MOST_TRIALS and not (trials and trials[-1].fits):
        taken = take(size)
        trials.append(Tried(size, taken, taken is not None and taken <= limit))
        size = int(_LESS * size) if taken is None else min(size - 1, int(size * limit / taken))
    return trials


def _print_result(row: Row, trials: list[Tried], reason: str, largest: int, limit: int) -> None:
    for each in trials:
        taken = "not enough memory" if each.tensor_bytes is None else f"{each.tensor_bytes / 2**20:,.1f} MiB of tensors"
        print(f"tried: {pluralize(each.micro_batch_size, 'sample')}: {taken}")
    if reason:
        print(f"not tried: {reason}")
    share = row.micro_batch_size * row.num_micro_batches
    if not largest:
        print("nothing fits; `paceline plan` compares other settings")
    elif largest >= share:
        print(f"the {pluralize(share, 'sample')} of a process's step fit at once; up to {largest:,} would")
    else:
        print(f"use train.micro_batch_size={largest}")
    evaluated = max((phase.memory.total for phase in row.evaluations), default=0)
    if evaluated > limit:
        batch = row.largest_evaluation_batch
        advice = f"use evaluate.batch_size={batch}" if batch else "not even one sample fits"
        print(f"evaluation needs {evaluated / 2**20:,.0f} MiB: {advice}")
