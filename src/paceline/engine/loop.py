"""The training loop: from the current step to the end of the run, and what is done between steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import NoReturn

import torch

from paceline.checkpoint.writer import SaveResult
from paceline.core.errors import CheckpointError, Stopped, TrainingError
from paceline.core.process import resume_gc
from paceline.core.text import pluralize
from paceline.data.loader import StepBatch, explain_dead_workers
from paceline.engine.evaluate import Evaluation, evaluate_with_average
from paceline.engine.loss_accumulator import read
from paceline.engine.replay import check_finite
from paceline.engine.run import Run, StepResult
from paceline.engine.step import train_step
from paceline.engine.visualizer import visualize_evaluation, visualize_samples
from paceline.loggers.events import Evaluated, Logged, Note, Saved, Snapshot

_MOST_UNREAD = 100  # steps whose losses may wait on the device
_RETRIES, _SECONDS_BETWEEN = 12, 5.0  # of the last save, if it fails


def train(run: Run) -> None:
    """Run all remaining steps, and after each what is due: save, evaluate, log and, at the end, test, in this order.

    Raises Stopped, with everything saved, when some process was asked to stop: after a step, or in an evaluation,
    which is then pending. What was pending when a resumed checkpoint was saved is done first.
    """
    triggers = run.triggers()
    with training(run):
        do_pending(run)
        for step_batch in steps(run):
            result = train_step(run, step_batch)
            record_step(run, step_batch, result)
            run.state.pending = triggers.due(run.progress.step)
            do_pending(run)
            stop_if_asked(run, result)


@contextmanager
def training(run: Run) -> Iterator[None]:
    """A context for training: stop signals become requests; at its end, whatever it is, saves and logs are finished."""
    run.freezing.train_mode(run.model)
    with run.stop.on_signals(), run.heartbeat.watched(), finish_saves(run), explain_dead_workers():
        try:
            yield
        except _OOM_ERRORS as error:
            _explain_oom(run, error)
        read_results(run)
        run.logger.flush()


def steps(run: Run) -> Iterator[StepBatch]:
    """The global batches that are left; with each, the time of its step begins, which `record_step` ends."""
    with closing(iter(run.batches)) as batches:  # type: ignore[type-var]  # workers end with it, whatever happens
        while True:
            started = time.perf_counter()
            step_batch = next(batches, None)
            if step_batch is None:
                return
            run.timer.start_step(waited=time.perf_counter() - started)
            run.heartbeat.beat(step_batch.step, "summing counts")
            if step_batch.step in run.freezing.unfreeze_steps:
                run.logger.emit(Note(run.freezing.describe_unfrozen(step_batch.step)))
            yield step_batch
            if saves := run.saver.poll():
                log_saves(run, saves)
            run.heartbeat.beat(run.progress.step, "waiting for data")


def record_step(run: Run, step_batch: StepBatch, result: StepResult) -> None:
    """Record the time, losses and norm of a step; of the first one, draw the samples."""
    run.timer.end_step(step_batch.num_samples)
    run.unread.append(result)
    if len(run.unread) >= _MOST_UNREAD:
        read_results(run)
    if change := run.lr_changes(result.lr):
        logged, lr = change
        before = run.lr_changes.jumped_from  # what changes at every step is on every line
        change_text = f"learning rate {logged if before is None else before:g} → {lr:g} after step {step_batch.step}"
        run.logger.emit(Note(change_text, "detail" if before is None else "info"))
    progress = run.progress
    run.logger.tick(Snapshot(progress.step, progress.total_steps, progress.epoch, run.timer.data_share))
    resume_gc()  # which start-up paused
    if step_batch.step == 0:
        visualize_samples(run)


def stop_if_asked(run: Run, result: StepResult) -> None:
    """Raise Stopped, with everything saved, if some process was asked to stop before the end."""
    if result.should_stop and not run.progress.is_done:
        save_all(run)
        raise Stopped(f"stopped after step {run.progress.step} {run.stop}; state is saved")


def do_pending(run: Run) -> None:
    """Do what is due at the current step. It is saved before it is evaluated, so that no failure costs training."""
    while run.state.pending:
        name = run.state.pending[0]
        _ACTIONS[name](run)
        del run.state.pending[0]


def read_results(run: Run) -> None:
    """Read the losses and norms of the last steps from the device, all at once, into the meters.

    See `check_finite` for norms that are not finite.
    """
    results, run.unread = run.unread, []
    norms = check_finite(run, results)
    columns = read([result.accumulator for result in results], run.world)
    columns |= {"grad_norm": norms, "lr": [result.lr for result in results]}
    finite = {name: list(filter(math.isfinite, column)) for name, column in columns.items()}
    run.state.meters.extend({name: column for name, column in finite.items() if column})


def log_training(run: Run) -> None:
    """Log the metrics of training."""
    for loader in (run.train_loader, *(each.loader for each in run.evaluations.values())):
        if loader.skips is not None:
            loader.skips.refresh()
    step = run.progress.step
    clock = run.timer.metrics(run.world, run.progress.total_steps - step)
    read_results(run)
    smoothed = run.state.meters.summaries()
    metrics = {name: summary["latest"] for name, summary in smoothed.items()} | run.precision.metrics()
    run.logger.emit(Logged(step, run.progress.epoch, metrics, smoothed, clock))


def evaluate_val(run: Run) -> None:
    """Evaluate on the validation split and update `best`; a resumed run may have the metrics already."""
    if run.state.evaluated_step != run.progress.step:
        measure(run, "val")
        run.state.evaluated_step = run.progress.step
    record_val_metrics(run)


def measure(run: Run, split: str) -> None:
    """Save the weights of this step, then evaluate them."""
    read_results(run)
    complete_save(run)
    log_evaluation(run, evaluate_with_average(run, split))


def measure_tests(run: Run) -> None:
    """Evaluate on every test set."""
    for split in run.test_splits:
        measure(run, split)


def log_evaluation(run: Run, evaluation: Evaluation) -> None:
    """Log an evaluation's metrics and write its images."""
    if evaluation.split == "val" and "val" not in run.state.metrics:
        _check_best(run, evaluation.metrics)
    if evaluation.note:
        run.logger.emit(Note(evaluation.note, "warning"))
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


def save_all(run: Run) -> None:
    """Start a checkpoint of everything that was logged so far."""
    read_results(run)
    save(run)


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


_ACTIONS: dict[str, Callable[[Run], None]] = {
    "save": save_all,
    "evaluate": evaluate_val,
    "log": log_training,
    "test": measure_tests,
}


_OOM_ERRORS = (torch.OutOfMemoryError, MemoryError, RuntimeError)


def _explain_oom(run: Run, error: Exception) -> NoReturn:
    """Raise an error again, with advice if memory ran out."""
    text = str(error)
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in text:
        raise error
    first = text.splitlines()[0] if text else "nothing more is known"
    advice = _advise_evaluation(run) if run.state.pending else _advise_step(run)
    raise TrainingError(f"out of memory {advice} ({first})") from error


def _advise_step(run: Run) -> str:
    size = max(cut.stop - cut.start for cut in run.batches.sampler.slices(run.progress.step))
    half = f"train.micro_batch_size={size // 2} (the same steps in smaller parts), " if size > 1 else ""
    return (
        f"in step {run.progress.step + 1}, with {pluralize(size, 'sample')} at a time. Try {half}"
        "train.activation_checkpointing=blocks, train.precision=bf16, or train.strategy=fsdp on several processes"
    )


def _advise_evaluation(run: Run) -> str:
    size = max((each.batch_size for each in run.evaluations.values()), default=1)
    smaller = f"evaluate.batch_size={size // 2}" if size > 1 else "smaller images in evaluation"
    return f"after step {run.progress.step}, with up to {pluralize(size, 'sample')} at a time. Try {smaller}"
