"""Train a run in its directory: `paceline.train`, and the context in which the command `train` takes its steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.best import best_step, resolve_best
from paceline.checkpoint.reader import step_folders
from paceline.core.agreement import decide
from paceline.core.errors import Stopped, UsageError, missing_extra
from paceline.core.generators import unchanged_generators
from paceline.core.regular_file import read_json
from paceline.core.user_code import named_errors
from paceline.engine.loop import train as train_steps
from paceline.engine.run import Run, RunInfo
from paceline.launch.environment import is_supervised, restart_count
from paceline.loggers.events import Ended, LoggerGroup, Record, Started
from paceline.loggers.jsonl import read_records
from paceline.run.directory import RunLock, check_writable, command_line, hold_lock, refuse_foreign
from paceline.run.loggers import list_skipped, open_directory
from paceline.run.resume import check_place, fingerprints, resume, watch_over
from paceline.run.summary import closing_lines, opening_lines


@dataclass(frozen=True)
class Start:
    """How a run is started, by default: from where its directory stands."""

    is_fresh: bool = False
    """Start over; the earlier run is renamed and kept."""
    checkpoint: Path | None = None
    """Continue from this one in place of the newest."""
    accepts_data: bool = False
    """Continue although the data changed."""
    is_process: bool = False
    """Whether this process does nothing else, so that it answers no signals of its own once it has stopped."""
    notes: Sequence[str] = ()
    """Lines about the start, for the console and the log."""


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint that a run keeps as its best, by the metric that `checkpoint.best` names."""

    step: int
    metric: str
    value: float | None
    checkpoint: Path


@dataclass(frozen=True)
class TrainResult:
    """What a training run has come to."""

    out: Path
    """The run directory."""
    metrics: dict[str, dict[str, float]]
    """The last metrics of each split that was evaluated."""
    history: list[Record] = field(repr=False)
    """All records of `metrics.jsonl`: each has "step", "epoch", "split" and metrics by name."""
    best: BestCheckpoint | None


@unchanged_generators()
def train(run: Run, fresh: bool = False) -> TrainResult:
    """Train a run in its directory, as the command does: it continues what is there already.

    A run that has made steps continues from them. With `fresh`, an earlier run is kept beside the new one.
    """
    if not isinstance(run, Run):
        raise UsageError("paceline.train takes a run that paceline.build made: paceline.train(paceline.build(RECIPE))")
    with open_run(run, fresh):
        train_steps(run)
    history = decide(run.world, lambda: read_records(run.out / "metrics.jsonl"))
    return TrainResult(run.out, dict(run.state.metrics), history, _best(run, history))


@contextmanager
def open_run(run: Run, fresh: bool = False) -> Iterator[None]:
    """A context for training a run in its directory: takes its lock and its loggers, continues from its newest save.

    A run that is finished has neither steps left nor anything pending.
    """
    _check_extras(run.info)
    check_writable(run.out)
    refuse_foreign(run.out)
    with hold_lock(run.out) if run.world.is_main else nullcontext() as lock:
        try:
            with open_locked(run, lock, Start(is_fresh=fresh)):
                yield
        finally:
            run.logger = LoggerGroup()  # those of the directory are closed


def _check_extras(info: RunInfo) -> None:
    """Raise UsageError if a package that the run logs with is not installed."""
    is_excel = info.results is not None and info.results.suffix == ".xlsx"
    for extra, is_used in {"wandb": info.wandb, "mlflow": info.mlflow, "excel": is_excel}.items():
        if is_used not in (None, False) and (missing := missing_extra(extra)):
            raise UsageError(f"logging: {missing}")


@contextmanager
def open_locked(run: Run, lock: RunLock | None, start: Start) -> Iterator[None]:
    """The context of `open_run` in a directory whose lock rank 0 holds already."""
    run.state.data = fingerprints(run)
    taken = lock.notes if lock else []
    notes = [*start.notes, *taken, *_find_place(run, start, lock)]
    if run.progress.step and run.progress.is_done and decide(run.world, lambda: _was_finished(run.out)):
        _print_finished(run)
        run.state.pending.clear()
        yield
        return
    open_directory(run)
    list_skipped(run)
    watch_over(run, run.info.hang_seconds)
    run.stop.is_starting = False
    with run.stop.on_signals(until_exit=start.is_process), _logged(run, notes):
        yield


def _print_finished(run: Run) -> None:
    if run.world.is_main:
        done = f"{run.progress.step} of {run.progress.total_steps} steps are done"
        print(f"{run.out} is finished: {done}", file=sys.stderr)
        if not run.info.recipe_yaml:  # no command can read it
            return
        hint = f"evaluate it with: {command_line('eval', run.out)}"
        print(f"{hint}; start over with --fresh; or increase train.epochs", file=sys.stderr)


def _was_finished(out: Path) -> bool:
    """Whether the run is finished; after the last step an evaluation may still be pending."""
    status = read_json(out / "status.json")
    return isinstance(status, dict) and status.get("state") == "finished"


def _find_place(run: Run, start: Start, lock: RunLock | None) -> list[str]:
    """Load the named checkpoint, else the newest valid one, else the recipe's weights; return notes on which."""
    is_first_start = restart_count() == 0  # what comes back after a crash goes on from where it was
    if start.is_fresh and is_first_start:
        kept = []
        if lock and (aside := lock.start_over()):
            kept = [f"the earlier run is kept as {aside}"]
        run.world.barrier()
        return [*kept, *run.info.origin_of_weights]
    if run.progress.step:  # steps were made from Python
        return check_place(run)

    moved = run.store.clear_best_path() if lock else None
    checkpoint, notes = resume(run, start.checkpoint, is_first_start, start.accepts_data)
    origin = () if checkpoint else run.info.origin_of_weights
    return [*([moved] if moved else []), *notes, *origin]


@contextmanager
def _logged(run: Run, notes: list[str]) -> Iterator[None]:
    """Log how training begins and how it ends."""
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
            lines=[*opening_lines(run), *notes],
            main_metric=run.store.best,
            direction=run.store.direction,
        )
    )
    try:
        with named_errors():
            yield
        lines = closing_lines(run, time.monotonic() - started)
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
    if step_folders(run.store.root):
        other = f", or {command_line('train', run.out)}" if run.info.recipe_yaml else ""
        return f"the state is saved in {run.out}; run the same command to resume{other}"
    return f"nothing was saved in {run.out} yet; run the same command to start again"


def _best(run: Run, history: list[Record]) -> BestCheckpoint | None:
    metric = run.store.best
    step = decide(run.world, lambda: best_step(run.out))
    if metric is None or step is None:
        return None
    values: list[Any] = [each.get(metric) for each in history if each["step"] == step and each["split"] == "val"]
    place = resolve_best(run.out / "best") or run.store.path_of(step)
    return BestCheckpoint(step, metric, values[-1] if values else None, place)
