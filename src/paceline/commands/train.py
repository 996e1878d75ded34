"""`paceline train`: train from a recipe, or resume a run."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.common import check_extras, check_writable, command_line, read_recipe, run_directory
from paceline.commands.run_directory import refuse_foreign, write_recipe
from paceline.commands.run_lock import RunLock, check_free, hold_lock
from paceline.core.atomic_write import remove_partial_files
from paceline.core.errors import Stopped, UsageError
from paceline.core.process import StopRequest
from paceline.core.regular_file import read_json
from paceline.launch.environment import find_place, is_supervised, restart_count
from paceline.launch.launcher import launch_if_needed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.engine.run import Run
    from paceline.loggers.events import Logger
    from paceline.recipe.build import Builder
    from paceline.recipe.schema import Logging
    from paceline.recipe.validate import CheckedRecipe

_IMAGE = re.compile(r"(?P<name>.+)-(?P<step>\d{8,})")


def main(options: argparse.Namespace) -> int:
    """Train; 0 when the run is finished."""
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
        from paceline.recipe.build import Builder

    builder = Builder(checked)
    with builder.world.together(), hold_lock(out) if builder.world.is_main else nullcontext() as lock:
        run = builder.run(out)
        run.stop = stop
        train_in_directory(run, builder, options, lock)


def train_in_directory(run: Run, builder: Builder, options: argparse.Namespace, lock: RunLock | None) -> None:
    """Continue a run from where its directory stands, or from where it stands itself, and train it to its end."""
    from paceline.commands.resume import fingerprints, watch_over
    from paceline.core.agreement import decide

    run.state.data = fingerprints(run)
    mapping = getattr(options, "device_mapping", None)
    taken = lock.notes if lock else []
    notes = [*([mapping] if mapping else []), *taken, *_find_place(run, options, builder, lock)]
    if run.progress.step and run.progress.is_done and decide(run.world, lambda: _was_finished(run.out)):
        _print_finished(run)
        return
    _open_directory(run, builder)
    _list_skipped(run)
    watch_over(run, builder.recipe.train.hang_seconds)
    run.stop.is_starting = False
    with run.stop.on_signals(until_exit=options.is_process):
        _train(run, builder, notes)


def _list_skipped(run: Run) -> None:
    """List skipped samples in the run directory and log them."""
    from paceline.loggers.events import Note

    for source in (run.train_loader, *(each.loader for each in run.evaluations.values())):
        if source.skips is not None:
            source.skips.open(run.out / "skipped.jsonl", lambda text: run.logger.emit(Note(text, "warning")))


def _print_finished(run: Run) -> None:
    if run.world.is_main:
        done = f"{run.progress.step} of {run.progress.total_steps} steps are done"
        print(f"{run.out} is finished: {done}", file=sys.stderr)
        hint = f"evaluate it with: {command_line('eval', run.out)}"
        print(f"{hint}; start over with --fresh; or increase train.epochs", file=sys.stderr)


def _was_finished(out: Path) -> bool:
    """Whether the run is finished; after the last step an evaluation may still be pending."""
    status = read_json(out / "status.json")
    return isinstance(status, dict) and status.get("state") == "finished"


def _find_place(run: Run, options: argparse.Namespace, builder: Builder, lock: RunLock | None) -> list[str]:
    """Load the named checkpoint, else the newest valid one, else the recipe's weights; return notes on which."""
    is_first_start = restart_count() == 0  # what comes back after a crash goes on from where it was
    if options.fresh and is_first_start:
        kept = []
        if lock and (aside := lock.start_over()):
            kept = [f"the earlier run is kept as {aside}"]
        run.world.barrier()
        return [*kept, *builder.origin_of_weights()]
    from paceline.commands.resume import check_place, resume

    if run.progress.step:  # steps were made from Python
        return check_place(run)

    moved = run.store.clear_best_path() if lock else None
    checkpoint, notes = resume(run, options.start, is_first_start, options.accept_data)
    origin = [] if checkpoint else builder.origin_of_weights()
    return [*([moved] if moved else []), *notes, *origin]


def _open_directory(run: Run, builder: Builder) -> None:
    """Create the run directory, truncate its records to the current step, and attach the loggers."""
    from paceline.commands.summary import expected_directions
    from paceline.loggers.confusion import ConfusionFile
    from paceline.loggers.console import Console
    from paceline.loggers.events import LoggerGroup, Note
    from paceline.loggers.files import LogFile, StatusFile
    from paceline.loggers.jsonl import JsonlLogger, read_records, truncate_after
    from paceline.loggers.results import About, ResultsRow
    from paceline.loggers.starts import StartsFile, environment
    from paceline.loggers.tensorboard import TensorBoardLogger, rebuild
    from paceline.report.report_file import ReportFile

    if run.world.is_main:
        (run.out / "logs").mkdir(parents=True, exist_ok=True)
        for folder in (run.out, run.out / "images", run.out / "logs" / "heartbeats"):
            remove_partial_files(folder)
    run.world.barrier()
    if not run.world.is_main:
        run.logger = LoggerGroup([LogFile(run.out / "logs" / f"rank-{run.world.rank}.log")])
        return
    write_recipe(run.out / "recipe.yaml", run.state.recipe, builder.checked)
    metrics, tensorboard = run.out / "metrics.jsonl", run.out / "tensorboard"
    sinks: list[Logger] = [
        Console(),
        StatusFile(run.out / "status.json", run.progress.total_steps),
        JsonlLogger(metrics),
    ]
    sinks.append(LogFile(run.out / "logs" / f"rank-{run.world.rank}.log"))
    if metrics.exists():
        truncate_after(metrics, run.progress.step, run.pending_splits)
    images = _images(run)
    if builder.recipe.logging.tensorboard:
        if tensorboard.exists():
            rebuild(tensorboard, read_records(metrics), images)
        sinks.append(TensorBoardLogger(tensorboard))
    recipe = builder.recipe
    if recipe.logging.results:
        about = About(recipe.name, recipe.task.name, recipe.model.name)
        table = Path(recipe.logging.results).expanduser()
        sinks.append(ResultsRow(table, run.out, about, lambda text: run.logger.emit(Note(text, "warning"))))
    sinks.append(ConfusionFile(run.out / "tables", getattr(run.task, "classes", [])))
    about_start = environment() | {"higher_is_better": expected_directions(run, recipe.expect)}
    sinks.append(StartsFile(run.out / "logs" / "starts.jsonl", about_start))
    sinks.append(ReportFile(run.out, lambda text: run.logger.emit(Note(text, "warning"))))
    run.logger = LoggerGroup([*sinks, *_trackers(run, recipe.logging)])


def _trackers(run: Run, logging: Logging) -> Iterator[Logger]:
    from paceline.loggers.events import Note
    from paceline.loggers.jsonl import read_records
    from paceline.loggers.mlflow import MlflowTracker
    from paceline.loggers.tracker import Tracker, TrackerLogger
    from paceline.loggers.wandb import WandbTracker

    trackers: dict[str, Tracker] = {}
    if logging.wandb:
        trackers["wandb"] = WandbTracker(run.out, run.state.recipe, **dict(logging.wandb))
    if logging.mlflow:
        trackers["mlflow"] = MlflowTracker(run.out, run.state.recipe, **dict(logging.mlflow))
    for name, tracker in trackers.items():
        records = read_records(run.out / "metrics.jsonl")
        yield TrackerLogger(name, tracker, lambda text: run.logger.emit(Note(text, "warning")), records)


def _images(run: Run) -> list[tuple[int, str, Path]]:
    """The images so far as (step, tag, file); those that will be drawn again are removed."""
    found = []
    for path in sorted((run.out / "images").glob("*-*-*.png")):
        # The name of a test set may have hyphens too.
        splits = [split for split in ("train", *run.evaluations) if path.name.startswith(f"{split}-")]
        split = max(splits, key=len, default="")
        ours = _IMAGE.fullmatch(path.stem.removeprefix(f"{split}-"))
        if ours is None or not split:
            continue
        name, step = ours["name"], int(ours["step"])
        is_pending = step == run.progress.step and split in run.pending_splits - {"train"}
        if step > run.progress.step or is_pending:
            path.unlink()
        else:
            found.append((step, f"{split}/{name}", path))
    return found


def _train(run: Run, builder: Builder, notes: list[str]) -> None:
    from paceline.commands.memory_warning import memory_warning
    from paceline.commands.summary import closing_lines, opening_lines
    from paceline.core.user_code import named_errors
    from paceline.engine.loop import train
    from paceline.loggers.events import Ended, Note, Started

    progress, logger = run.progress, run.logger
    started = time.monotonic()
    logger.emit(
        Started(
            name=run.name,
            out=run.out,
            device=str(run.world.device),
            world=run.world.size,
            total_steps=progress.total_steps,
            steps_per_epoch=progress.steps_per_epoch,
            resumed_step=progress.step,
            lines=[*opening_lines(builder, run), *notes],
            main_metric=run.store.best,
            direction=run.store.direction,
        )
    )
    try:
        if run.world.is_main and progress.step == 0 and restart_count() == 0:
            for text in memory_warning(run, builder.recipe.train.hang_seconds / 2):
                logger.emit(Note(text, "warning"))
        with named_errors():
            train(run)
        lines = closing_lines(run, builder.recipe.expect, time.monotonic() - started)
        logger.emit(Ended("finished", progress.step, progress.epoch, lines))
    except BaseException as error:
        state = "stopped" if isinstance(error, Stopped) else "failed"
        reason = str(error) or type(error).__name__
        lines = [_how_to_go_on(run)]
        # Of several processes the launcher reports the one that failed first.
        is_reported = is_supervised() and not isinstance(error, Stopped)
        logger.emit(Ended(state, progress.step, progress.epoch, lines, reason, is_reported))
        raise
    finally:
        logger.close()


def _how_to_go_on(run: Run) -> str:
    from paceline.checkpoint.reader import step_folders

    if step_folders(run.store.root):
        return f"the state is saved in {run.out}; run the same command to resume, or {command_line('train', run.out)}"
    return f"nothing was saved in {run.out} yet; run the same command to start again"
