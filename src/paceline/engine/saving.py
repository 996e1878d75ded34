"""Checkpoints of a run: begun at a step, written beside training, told of when they are done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.checkpoint.background import Outcome
from paceline.core.errors import CheckpointError
from paceline.engine.run import Run
from paceline.observe.events import Note, Saved

_RETRIES, _SECONDS_BETWEEN = 12, 5.0


def save(run: Run) -> None:
    """Begin a checkpoint, unless this step has one; all processes bring their part."""
    if run.saver.last_step == run.progress.step:
        return
    run.heartbeat.beat(run.progress.step, "saving")
    _begin(run)


def report(run: Run, outcomes: list[Outcome]) -> bool:
    """Tell of the saves that have ended; whether all of them were committed."""
    for outcome in outcomes:
        if outcome.error is None:
            run.observer.emit(Saved(outcome.step, outcome.path, outcome.is_best))
        else:
            run.observer.emit(Note(f"{outcome.error}; training goes on, and the next save tries again", "warning"))
    return all(outcome.error is None for outcome in outcomes)


@contextmanager
def completing_saves(run: Run) -> Iterator[None]:
    """What was begun inside is on the disk afterwards; if the run fails, as far as this process can see to it alone."""
    try:
        yield
    except BaseException:
        if run.mesh.world == 1 or run.parallel.passes != "even":  # else a checkpoint has parts of all processes
            report(run, run.saver.finish())
        raise
    finish_saving(run)


def finish_saving(run: Run) -> None:
    """Have the newest checkpoint on the disk; where that fails it is tried again, and in the end it is an error."""
    for attempt in range(_RETRIES + 1):
        run.saver.release()
        outcomes = run.saver.finish()
        report(run, outcomes)
        failed = bool(outcomes) and outcomes[-1].error is not None
        if not run.mesh.start_sum([float(failed)])()[0]:
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
    model, state = run.saved_model(), run.state()
    figures = run.figures.get("val", {}) if run.evaluated_step == run.progress.step else {}
    run.observer.flush()  # a checkpoint means that all that was due at its step is done
    run.saver.begin(run.progress.step, model, state, figures, run.lasting())
