"""What training logs: losses and learning rates of steps, metrics of evaluations."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter

from paceline.data.loader import StepBatch
from paceline.engine.evaluate import Evaluation
from paceline.engine.loss_accumulator import Columns, read, read_columns
from paceline.engine.run import Run, UnreadResults
from paceline.engine.trainer import StepResult
from paceline.engine.visualizer import visualize_evaluation
from paceline.loggers.events import SECONDS_BETWEEN_FLUSHES, Evaluated, Logged, Note, Snapshot

_MOST_UNREAD = 100  # steps whose losses may wait on the device


def add_result(run: Run, step_batch: StepBatch, result: StepResult) -> None:
    """Record a step; tensors are read when there are many."""
    run.unread.results.append(result)
    if len(run.unread.results) >= _MOST_UNREAD:
        read_results(run)
    if change := run.lr_changes(result.lr):
        logged, lr = change
        before = run.lr_changes.jumped_from  # what changes at every step is on every line
        change_text = f"learning rate {logged if before is None else before:g} → {lr:g} after step {step_batch.step}"
        run.logger.emit(Note(change_text, "detail" if before is None else "info"))
    progress = run.progress
    run.logger.tick(Snapshot(progress.step, progress.total_steps, progress.epoch, run.timer.data_share))


def read_results(run: Run) -> None:
    """Read the losses and norms of the last steps from the device, all at once, and write the lines that wait for them.

    See `Run.check_finite` for norms that are not finite.
    """
    results, lines = run.unread.results, run.unread.lines
    run.unread = UnreadResults(next_read=time.monotonic() + SECONDS_BETWEEN_FLUSHES)
    [norms] = read_columns([[result.grad_norm for result in results]])
    columns = read([result.accumulator for result in results], run.world)
    columns |= {"grad_norm": norms, "lr": [result.lr for result in results]}
    first = 0
    for line in lines:
        last = bisect_left(results, line.step, first, key=attrgetter("step"))
        _add_steps(run, results[first:last], {name: column[first:last] for name, column in columns.items()})
        first = last
        smoothed = run.state.meters.summaries()
        metrics = {name: summary["latest"] for name, summary in smoothed.items()}
        run.logger.emit(replace(line, metrics=metrics | line.metrics, smoothed=smoothed))
    _add_steps(run, results[first:], {name: column[first:] for name, column in columns.items()})


def _add_steps(run: Run, results: Sequence[StepResult], columns: Columns) -> None:
    """Add the losses, metrics and norms of steps to the meters, but for those that are not finite."""
    for result, norm in zip(results, columns["grad_norm"], strict=True):
        run.check_norm(result, norm)
    finite = {name: list(filter(math.isfinite, column)) for name, column in columns.items()}
    run.state.meters.extend({name: column for name, column in finite.items() if column})


def log_training(run: Run) -> None:
    """Log the metrics of training, at once or, where lines follow each other quickly, with some that come next.

    Processes read together, so they cannot go by their clocks.
    """
    for loader in (run.train_loader, *(each.loader for each in run.evaluations.values())):
        if loader.skips is not None:
            loader.skips.refresh()
    clock = run.timer.metrics(run.world, run.progress, _seconds_left(run))
    run.unread.lines.append(Logged(run.progress.step, run.progress.epoch, run.precision.metrics(), clock=clock))
    if run.world.size > 1 or time.monotonic() >= run.unread.next_read:
        read_results(run)
        if run.world.device.type == "cpu" and (sentence := run.timer.contention()):
            run.logger.emit(Note(sentence, "warning"))


@contextmanager
def log_all(run: Run) -> Iterator[None]:
    """A context for training: no line of the log still waits at its end, whatever the end is."""
    try:
        yield
    except Exception:
        if run.unread.lines:
            with suppress(Exception):  # the device may be what failed
                read_results(run)
        raise
    read_results(run)
    run.logger.flush()


def _seconds_left(run: Run) -> float:
    """The time left at the speed so far: steps, saves and evaluations."""
    step, sizes = run.progress.step, {name: len(each.loader.dataset) for name, each in run.evaluations.items()}
    num_samples = {"evaluate": sizes.get("val", 0), "test": sum(sizes[name] for name in run.test_splits)}
    left = run.triggers().left(step, run.state.pending[1:])  # the first is this line of the log
    return run.timer.seconds_left(run.progress.total_steps - step, left, num_samples)


def log_evaluation(run: Run, evaluation: Evaluation) -> None:
    """Log an evaluation's metrics and write its images."""
    if evaluation.split == "val" and "val" not in run.state.metrics:
        _check_best(run, evaluation.metrics)
    if evaluation.problem:
        run.logger.emit(Note(f"{evaluation.problem}; training continues", "warning"))
    run.state.metrics[evaluation.split] = evaluation.metrics
    confusion = evaluation.tables.get("confusion")
    run.logger.emit(
        Evaluated(
            run.progress.step,
            run.progress.epoch,
            evaluation.split,
            evaluation.metrics,
            evaluation.num_samples,
            evaluation.num_skipped,
            clock={"seconds": evaluation.seconds, "time": time.time()},
            confusion=None if confusion is None else confusion.tolist(),
        )
    )
    visualize_evaluation(run, evaluation.split, evaluation.tables, evaluation.drawn)


def _check_best(run: Run, metrics: Mapping[str, float]) -> None:
    best = run.store.best
    if best is not None and best not in metrics:
        known = ", ".join(metrics)
        run.logger.emit(
            Note(f"checkpoint.best: no metric is called {best!r}, so none is kept; there are {known}", "warning")
        )
