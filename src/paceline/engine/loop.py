"""The training loop: from the current step to the end of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import NoReturn

import torch

from paceline.core.errors import Stopped, TrainingError
from paceline.core.process import resume_gc
from paceline.core.text import pluralize
from paceline.data.loader import StepBatch, explain_dead_workers
from paceline.engine.evaluate import evaluate_with_average
from paceline.engine.run import Run
from paceline.engine.saving import complete_save, finish_saves, log_saves, record_val_metrics, save
from paceline.engine.step import train_step
from paceline.engine.trainer import StepResult
from paceline.engine.training_log import add_result, log_all, log_evaluation, log_training, read_results
from paceline.engine.visualizer import visualize_samples
from paceline.loggers.events import Note


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
    with run.stop.on_signals(), run.heartbeat.watched(), finish_saves(run), explain_dead_workers(), log_all(run):
        try:
            yield
        except _OOM_ERRORS as error:
            _explain_oom(error, partial(_advise_evaluation if run.state.pending else _advise_step, run))


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
    run.timer.end_step(step_batch.num_samples, run.progress.total_steps)
    add_result(run, step_batch, result)
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
        with run.timer.action(name):
            _ACTIONS[name](run)
        del run.state.pending[0]


def save_all(run: Run) -> None:
    """Start a checkpoint of everything that was logged so far."""
    read_results(run)
    save(run)


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


_ACTIONS: dict[str, Callable[[Run], None]] = {
    "save": save_all,
    "evaluate": evaluate_val,
    "log": log_training,
    "test": measure_tests,
}
_OOM_ERRORS = (torch.OutOfMemoryError, MemoryError, RuntimeError)


def _explain_oom(error: Exception, advise: Callable[[], str]) -> NoReturn:
    """Raise an error again, with advice if memory ran out."""
    text = str(error)
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in text:
        raise error
    first = text.splitlines()[0] if text else "nothing more is known"
    raise TrainingError(f"out of memory {advise()} ({first})") from error


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
