"""`paceline train`: train from a recipe, or resume a run."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.common import add_processes, add_recipe, check_extras, read_recipe, run_directory
from paceline.core.errors import UsageError
from paceline.core.process import StopRequest
from paceline.launch.environment import find_place

if TYPE_CHECKING:
    from paceline.recipe.validate import CheckedRecipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser)
    parser.add_argument("--out", type=Path, help="run directory (default: runs/NAME)")
    parser.add_argument("--from", dest="start", type=Path, metavar="CHECKPOINT", help="start from this checkpoint")
    parser.add_argument("--fresh", action="store_true", help="start over; the earlier run is renamed and kept")
    parser.add_argument(
        "--accept-data", action="store_true", help="resume although the data changed; prints what changed"
    )
    add_processes(parser)


def main(options: argparse.Namespace) -> int:
    """Train; 0 when the run is finished."""
    from paceline.launch.launcher import launch_if_needed
    from paceline.run.directory import check_free, check_writable, refuse_foreign

    checked = read_recipe(options)
    check_extras(checked)
    continued = run_directory(options.recipe)
    if continued and options.out and not continued.samefile(options.out):
        raise UsageError(f"--out {options.out}: {continued} is a run that is continued where it is; leave --out away")
    out: Path = continued or options.out or Path("runs") / checked.recipe.name
    if options.fresh and options.start:
        raise UsageError("--fresh is incompatible with --from: --from continues a checkpoint, --fresh starts over")
    check_writable(out)
    refuse_foreign(out)
    is_alone = find_place(os.environ) is None
    # Among several processes, or machines, the first one takes the directory for all.
    if is_alone and options.rendezvous is None:
        check_free(out)
    train = checked.recipe.train
    code = launch_if_needed(options, train.device, train.devices, train.strategy.name)
    if code is not None:
        return code

    stop = StopRequest(is_starting=True)
    # Processes that wait for each other to come could answer no signal: until they train, one ends them.
    with stop.on_signals(until_exit=options.is_process) if is_alone else nullcontext():
        _build_and_train(options, checked, out, stop)
    return 0


def _build_and_train(options: argparse.Namespace, checked: CheckedRecipe, out: Path, stop: StopRequest) -> None:
    with stop.held():  # the recipe is known to be right: from here on torch is needed
        from paceline.engine.loop import train
        from paceline.recipe.build import Builder
        from paceline.run.directory import hold_lock
        from paceline.run.train import Start, open_locked

    builder = Builder(checked)
    start = Start(
        options.fresh, options.start, options.accept_data, options.is_process, getattr(options, "device_notes", ())
    )
    with builder.world.together(), hold_lock(out) if builder.world.is_main else nullcontext() as lock:
        run = builder.run(out)
        run.stop = stop
        with open_locked(run, lock, start):
            train(run)
