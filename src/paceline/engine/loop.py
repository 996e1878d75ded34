"""Training from where a run stands to its end."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing

import torch

from paceline.core import process_memory as garbage
from paceline.core.errors import Stopped
from paceline.core.intervals import Triggers
from paceline.data.loader import StepBatch
from paceline.engine.evaluate import Evaluation, evaluate_with_average
from paceline.engine.failures import explain_failures
from paceline.engine.loss_accumulator import read
from paceline.engine.process_benefit import compare, is_due
from paceline.engine.run import Run, StepResult
from paceline.engine.saving import complete_save, completing_saves, enter_figures, report, save
from paceline.engine.step import train_step
from paceline.engine.visualizer import visualize_evaluation, visualize_samples
from paceline.loggers.events import Evaluated, Logged, Note, Snapshot

_UNREAD = 500  # steps whose losses may wait to be read


def train(run: Run) -> None:
    """Do all steps that are left, and after each what is due: save, evaluate, record, in this order.

    Raises Stopped, with everything saved, when some process was asked to stop: behind a step, or in an evaluation,
    which is then pending. What was pending when a resumed checkpoint was saved is done first.
    """
    triggers = _make_agenda(run)
    run.freezing.train_mode(run.model)
    with run.stop.on_signals(), run.heartbeat.watched(), completing_saves(run), explain_failures(run):
        do_pending(run)
        for step_batch, waited in timed(run.batches):
            started = time.perf_counter()
            run.heartbeat.beat(step_batch.step, "agreeing on a step")
            result = train_step(run, step_batch)
            observe(run, step_batch, result, waited, time.perf_counter() - started)
            garbage.resume()
            if step_batch.step == 0:
                visualize_samples(run)
            if is_due(run) and (advice := compare(run, step_batch)):
                run.logger.emit(Note(advice, "warning"))
            run.pending = triggers.due(run.progress.step)
            do_pending(run)
            report(run, run.saver.poll())
            run.heartbeat.beat(run.progress.step, "waiting for data")
            if result.should_stop and not run.progress.is_done:
                save_all(run)
                raise Stopped(f"stopped after step {run.progress.step} {run.stop}; state is saved")
        run.logger.flush()


def _make_agenda(run: Run) -> Triggers:
    triggers = Triggers(run.progress.total_steps)
    triggers.add(run.intervals.save, "save")
    if "val" in run.evaluations:
        triggers.add(run.intervals.evaluate, "evaluate")
    triggers.add(run.intervals.log, "record")
    if run.test_splits:
        triggers.add(math.inf, "test")  # once, after the last step
    return triggers


def do_pending(run: Run) -> None:
    """Do what is due at the present step. Before it is measured it is saved, so that no failure costs any training."""
    actions: dict[str, Callable[[Run], None]] = {
        "save": save_all,
        "evaluate": evaluate_val,
        "record": record,
        "test": measure_tests,
    }
    while run.pending:
        actions[run.pending[0]](run)
        del run.pending[0]


def timed(batches: Iterable[StepBatch]) -> Iterator[tuple[StepBatch, float]]:
    """Each update with the seconds that were spent waiting for it."""
    with closing(iter(batches)) as iterator:  # type: ignore[type-var]  # workers end with it, whatever happens
        while True:
            started = time.perf_counter()
            step_batch = next(iterator, None)
            if step_batch is None:
                return
            yield step_batch, time.perf_counter() - started


def observe(run: Run, step_batch: StepBatch, result: StepResult, waited: float, seconds: float) -> None:
    """Take note of a step without reading any tensor."""
    run.unread.append(result)
    if len(run.unread) >= _UNREAD:
        take_readings(run)
    own, run.forward_seconds = run.forward_seconds + waited, 0.0
    run.clock.add(
        {"step_time": seconds + waited, "data_time": waited, "own_time": own, "samples": step_batch.num_samples}
    )
    if change := run.lr_changes(result.lr):
        run.logger.emit(Note("learning rate {:g} → {:g} at step {}".format(*change, step_batch.step), "detail"))
    progress = run.progress
    share = waited / (waited + seconds)
    run.logger.tick(Snapshot(progress.step, progress.total_steps, progress.epoch, share))


def take_readings(run: Run) -> None:
    """Bring the losses and norms of the last steps, which wait unread, among the meters."""
    results, run.unread = run.unread, []
    losses = read([result.accumulator for result in results], run.world)
    for metrics, result in zip(losses, results, strict=True):
        run.meters.add({**metrics, "grad_norm": result.grad_norm, "lr": result.lr})


def record(run: Run) -> None:
    """Log the metrics of training."""
    for source in (run.source, *(each.source for each in run.evaluations.values())):
        if source.skips is not None:
            source.skips.hear()
    take_readings(run)
    smoothed = run.meters.summaries()
    metrics = {name: summary["latest"] for name, summary in smoothed.items()} | run.precision.metrics()
    run.logger.emit(Logged(run.progress.step, run.progress.epoch, metrics, smoothed, clock_figures(run)))


def clock_figures(run: Run) -> dict[str, object]:
    """Speed, time left and memory: what depends on the machine; shares and memory are those of the worst process.

    The slowest process is the one that needs longest for its data and its forward passes, which wait for no other.
    """
    summaries = run.clock.summaries()
    if not summaries:  # a resumed run that records what was pending
        return {"time": time.time()}
    step_time, data_time = summaries["step_time"], summaries["data_time"]
    steps_left = run.progress.total_steps - run.progress.step
    own = [data_time["mean"] / step_time["mean"], peak_memory(run.world.device) / 2**20, summaries["own_time"]["mean"]]
    ranks = torch.stack(run.world.gather(torch.tensor(own, dtype=torch.float64)))
    data_wait, memory, busy = ranks.max(0).values.tolist()
    metrics = {
        "time": time.time(),
        "step_time": step_time,
        "data_time": data_time,
        "samples_per_second": summaries["samples"]["mean"] / step_time["mean"],
        "data_wait": data_wait,
        "memory_mb": memory,
        "eta_seconds": steps_left * step_time["median"],
    }
    if run.world.size > 1:
        metrics |= {"slowest_rank": int(ranks[:, 2].argmax()), "slowest_by": busy / ranks[:, 2].mean().item()}
    return metrics


def peak_memory(device: torch.device) -> int:
    """The most memory used so far, in bytes: of the device, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def evaluate_val(run: Run) -> None:
    """Measure on the split that guides training, and have `best` follow; a resumed run may have the metrics already."""
    if run.evaluated_step != run.progress.step:
        measure(run, "val")
        run.evaluated_step = run.progress.step
    enter_figures(run)


def measure(run: Run, split: str) -> None:
    """Measure the weights of this step, which are saved first."""
    take_readings(run)
    complete_save(run)
    publish(run, evaluate_with_average(run, split))


def measure_tests(run: Run) -> None:
    """Measure on every test set."""
    for split in run.test_splits:
        measure(run, split)


def publish(run: Run, evaluation: Evaluation) -> None:
    """Record an evaluation's metrics and write its images."""
    if evaluation.split == "val" and "val" not in run.metrics:
        _check_best(run, evaluation.metrics)
    if evaluation.problem:
        run.logger.emit(Note(f"{evaluation.problem}; training goes on", "warning"))
    run.metrics[evaluation.split] = evaluation.metrics
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
    visualize_evaluation(run, evaluation)


def _check_best(run: Run, metrics: Mapping[str, float]) -> None:
    best = run.store.best
    if best is not None and best not in metrics:
        known = ", ".join(metrics)
        run.logger.emit(
            Note(f"checkpoint.best: no metric is called {best!r}, so none is kept; there are {known}", "warning")
        )


def save_all(run: Run) -> None:
    """Begin a checkpoint of all that was recorded so far."""
    take_readings(run)
    save(run)
