"""Checkpoints of a run: begun at a step, written beside training, logged when they are done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.checkpoint.writer import SaveResult
from paceline.core.errors import CheckpointError, Stopped
from paceline.engine.run import Run
from paceline.loggers.events import Note, Saved

_RETRIES, _SECONDS_BETWEEN = 12, 5.0


def save(run: Run) -> None:
    """Start a checkpoint, unless this step has one; every rank contributes its part."""
    if run.saver.last_step == run.progress.step:
        return
    run.heartbeat.beat(run.progress.step, "saving")
    _begin(run)


def complete_save(run: Run) -> None:
    """Wait for this step's checkpoint on all ranks, before what may take long or fail; tried once."""
    save(run)
    log_saves(run, run.saver.finish())
    run.world.barrier()


def record_val_metrics(run: Run) -> None:
    """Add the metrics of the validation split to this step's checkpoint, which may be the best now."""
    try:
        saved = run.saver.record_metrics(run.progress.step, run.state.metrics["val"])
    except CheckpointError as error:
        run.logger.emit(Note(f"{error}; training continues", "warning"))
        return
    if saved is not None and saved.is_best:
        run.logger.emit(Note(f"best so far: {saved.path}"))


def log_saves(run: Run, outcomes: list[SaveResult]) -> None:
    """Log the saves that have ended."""
    for outcome in outcomes:
        if outcome.error is None:
            run.logger.emit(Saved(outcome.step, outcome.path, outcome.is_best))
        else:
            run.logger.emit(Note(f"{outcome.error}; training continues, and the next save tries again", "warning"))


@contextmanager
def finish_saves(run: Run) -> Iterator[None]:
    """On exit, wait for saves that were started inside; if the run fails, as far as this rank can alone."""
    try:
        yield
    except Stopped:  # which all processes agree on
        _finish_newest(run)
        raise
    except BaseException:
        if run.world.size == 1 or run.strategy.passes != "equal":  # else a checkpoint has parts of all processes
            log_saves(run, run.saver.finish())
        raise
    _finish_newest(run)


def _finish_newest(run: Run) -> None:
    """Wait for the newest checkpoint; a failed save is retried, and in the end it is an error."""
    for attempt in range(_RETRIES + 1):
        log_saves(run, run.saver.finish())
        if not run.world.start_sum([float(run.saver.has_failed)])()[0]:
            return
        if attempt < _RETRIES:
            time.sleep(_SECONDS_BETWEEN)
            run.heartbeat.beat(run.progress.step, "saving again")
            _begin(run)
    raise CheckpointError(
        f"the state after step {run.progress.step} could not be saved; the checkpoints before it are as they were."
        f" Free some space at {run.store.root} and start the same command again"
    )


def _begin(run: Run) -> None:
    state = run.state
    model, tree = state.model_parts(), state.state_dict()
    metrics = state.metrics.get("val", {}) if state.evaluated_step == run.progress.step else {}
    run.logger.flush()  # a checkpoint means that all is recorded but what it says is pending
    run.saver.start(run.progress.step, model, tree, metrics)
