"""`paceline sweep`: train a recipe with several values of its keys, and compare the runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.common import add_json, add_recipe, check_extras, print_json, recipe_file, use_modules
from paceline.core.errors import RecipeError, Stopped, UsageError
from paceline.core.process import StopRequest
from paceline.core.text import pluralize
from paceline.launch.environment import find_place

if TYPE_CHECKING:
    from paceline.commands.sweep_trials import SweepFile, Trial
    from paceline.recipe.schema import Recipe
    from paceline.recipe.search_space import SearchSpace

_MOST = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser)
    parser.add_argument("--samples", type=int, metavar="N", help="draw N random trials (default: all combinations)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random trials (default: 0)")
    parser.add_argument("--jobs", type=int, metavar="N", default=1, help="runs at a time (default: 1)")
    parser.add_argument("--procs", type=int, metavar="N", help="processes of each run, as for train")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of all runs (default: runs/NAME-sweep)")
    parser.add_argument("--retry", action="store_true", help="start failed runs again too")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Run all trials that are not finished; 0 when all are, 1 if some failed, 75 if some are left."""
    if find_place(os.environ) is not None:
        raise UsageError("sweep starts the processes of its runs itself; start it once, without torchrun or srun")
    for name in ("jobs", "procs"):
        if getattr(options, name) is not None and not 1 <= getattr(options, name) <= _MOST:
            raise UsageError(f"--{name}: expected a number from 1 to {_MOST}, got {getattr(options, name)}")
    from paceline.commands.sweep_trials import SweepFile
    from paceline.recipe.search_space import read_search_space
    from paceline.run.directory import check_writable, hold_lock

    use_modules(options.use, options.recipe)
    file_name, space = recipe_file(options.recipe), read_search_space(options.overrides)
    trials = space.grid() if options.samples is None else space.sample(options.samples, options.seed)
    recipe = _check_all(file_name, space, trials)
    out: Path = options.out or Path("runs") / f"{recipe.name}-sweep"
    check_writable(out)
    shared = {"recipe": file_name, "overrides": space.shared, "use": options.use}
    SweepFile(out, shared, trials)  # a folder of something else is refused before it is locked

    processes = [] if options.procs is None else ["--procs", str(options.procs)]

    def words(trial: Trial) -> list[str]:
        """The arguments of `paceline` that train a trial."""
        overrides = [*space.overrides(trial.overrides), f"name={recipe.name}-{trial.run}"]
        used = [word for module in options.use for word in ("--use", module)]
        return ["train", file_name, *overrides, *used, "--out", str(out / trial.run), *processes]

    with hold_lock(out):
        file = SweepFile(out, shared, trials)
        file.write()
        return _run(file, recipe, words, options)


def _check_all(file_name: str, space: SearchSpace, trials: Sequence[tuple[str, ...]]) -> Recipe:
    """Check the recipe of every trial, and raise all mistakes at once; returns the first recipe."""
    from paceline.recipe.load import load
    from paceline.recipe.validate import validate

    problems: list[str] = []
    recipes = []
    for trial in trials:
        try:
            checked = validate(load(file_name, space.overrides(trial)))
            check_extras(checked)
            recipes.append(checked.recipe)
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    return recipes[0]


def _run(file: SweepFile, recipe: Recipe, words: Callable[[Trial], list[str]], options: argparse.Namespace) -> int:
    from paceline.commands.sweep_trials import run_trials
    from paceline.launch.job_pool import JobPool

    left_out = ("finished", "running") if options.retry else ("finished", "running", "failed")
    due = [trial for trial in file.wanted if trial.state not in left_out]
    counts = ", ".join(f"{number} {state}" for state, number in Counter(each.state for each in file.wanted).items())
    print(f"sweep    {pluralize(len(file.wanted), 'trial')} in {file.out}: {counts}", file=sys.stderr)
    num_jobs = min(options.jobs, len(file.wanted))  # as many as at the first start: shares of cores change results
    devices = [] if recipe.train.device == "cpu" else _devices()
    if devices and num_jobs > 1 and recipe.train.devices:
        raise UsageError("train.devices is incompatible with --jobs, which divides the devices; remove one of them")
    stop = StopRequest()
    with stop.on_signals(until_exit=options.is_process):
        run_trials(file, due, words, JobPool(num_jobs, devices, options.procs or 1), stop)
        _print_results(file, options.json)
    return _exit_code(file, stop)


def _devices() -> list[str]:
    """The CUDA devices that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    from paceline.launch.devices import count_devices, visible_names

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count_devices())]
    return names if visible is None else visible_names(visible)[: len(names)]


def _print_results(file: SweepFile, is_json: bool) -> None:
    """Print a table of all runs that have metrics, and write a report over them."""
    from paceline.commands.results import groups_json, print_groups, read_groups
    from paceline.report.page import write_report

    runs = [file.folder(trial) for trial in file.trials if (file.folder(trial) / "metrics.jsonl").is_file()]
    groups = read_groups(runs) if runs else []
    if is_json:
        print_json({"sweep": str(file.out), "trials": [asdict(trial) for trial in file.trials], **groups_json(groups)})
    else:
        print_groups(groups)
    if runs:
        write_report(runs, file.out / "report.html")
        print(f"report   {file.out / 'report.html'}", file=sys.stderr)


def _exit_code(file: SweepFile, stop: StopRequest) -> int:
    """Report the trials that are not finished."""
    states = [trial.state for trial in file.wanted]
    for trial in file.wanted:
        if trial.state == "failed":
            print(f"failed   {trial}: {trial.reason}", file=sys.stderr)
        elif trial.state == "running":
            print(f"in use   {trial}: another process trains it", file=sys.stderr)
    if "failed" in states:
        print("the same command with --retry starts failed trials again", file=sys.stderr)
    if stop.requested:
        raise Stopped(f"stopped {stop}; the same command continues the sweep")
    if "failed" in states:
        return 1
    return 0 if set(states) == {"finished"} else Stopped.exit_code
