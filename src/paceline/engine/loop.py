"""Training from where a run stands to its end."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager

import torch

from paceline.core import garbage
from paceline.core.errors import Stopped
from paceline.core.progress import Agenda
from paceline.data.loading.loader import Update, naming_dead_workers
from paceline.engine.evaluate import Evaluation, evaluate_with_average
from paceline.engine.gallery import draw_evaluation, draw_samples
from paceline.engine.health import naming_lack_of_memory
from paceline.engine.probe import compare, is_due
from paceline.engine.run import Run
from paceline.engine.saving import completing_saves, finish_saving, report, save
from paceline.engine.step import StepResult, train_step
from paceline.engine.tally import read
from paceline.observe.events import Evaluated, Logged, Note, Snapshot

_UNREAD = 500  # updates whose losses may wait to be read


def train(run: Run) -> None:
    """Do all updates that are left, and after each what is due: evaluate, record, save, in this order.

    Raises Stopped, with everything saved, when some process was asked to stop.
    """
    agenda = Agenda(run.progress.total_steps)
    agenda.add(run.periods.evaluate, lambda: evaluate_all(run))
    agenda.add(run.periods.log, lambda: record(run))
    agenda.add(run.periods.save, lambda: save_all(run))
    run.freezing.train_mode(run.model)
    with run.stop.on_signals(), run.heartbeat.watched(), completing_saves(run), explaining_failures(run):
        for update, waited in timed(run.batches):
            started = time.perf_counter()
            run.heartbeat.beat(update.step, "agreeing on an update")
            result = train_step(run, update)
            observe(run, update, result, waited, time.perf_counter() - started)
            garbage.resume()
            if update.step == 0:
                draw_samples(run)
            if is_due(run) and (advice := compare(run, update)):
                run.observer.emit(Note(advice, "warning"))
            for action in agenda.due(run.progress.step):
                action()
            report(run, run.saver.poll())
            run.heartbeat.beat(run.progress.step, "waiting for data")
            if result.should_stop and not run.progress.is_done:
                save_all(run)
                finish_saving(run)
                raise Stopped(f"stopped after step {run.progress.step} on request ({run.stop.reason}); state is saved")


@contextmanager
def explaining_failures(run: Run) -> Iterator[None]:
    """Have what torch says of dead workers and of lack of memory said so that a user can act on it."""
    with naming_dead_workers(), naming_lack_of_memory(run):
        yield


def timed(batches: Iterable[Update]) -> Iterator[tuple[Update, float]]:
    """Each update with the seconds that were spent waiting for it."""
    with closing(iter(batches)) as iterator:  # type: ignore[type-var]  # workers end with it, whatever happens
        while True:
            started = time.perf_counter()
            update = next(iterator, None)
            if update is None:
                return
            yield update, time.perf_counter() - started


def observe(run: Run, update: Update, result: StepResult, waited: float, seconds: float) -> None:
    """Take note of an update without reading any tensor."""
    run.unread.append(result)
    if len(run.unread) >= _UNREAD:
        take_readings(run)
    own, run.forward_seconds = run.forward_seconds + waited, 0.0
    run.clock.add({"step_time": seconds + waited, "data_time": waited, "own_time": own, "samples": update.num_samples})
    if change := run.lr_changes(result.lr):
        run.observer.emit(Note("learning rate {:g} → {:g} at step {}".format(*change, update.step), "detail"))
    progress = run.progress
    share = waited / (waited + seconds)
    run.observer.tick(Snapshot(progress.step, progress.total_steps, progress.epoch, share))


def take_readings(run: Run) -> None:
    """Bring the losses and norms of the last updates, which wait unread, among the meters."""
    results, run.unread = run.unread, []
    losses = read([result.tally for result in results], run.mesh)
    for figures, result in zip(losses, results, strict=True):
        run.meters.add({**figures, "grad_norm": result.grad_norm, "lr": result.lr})


def record(run: Run) -> None:
    """Log the figures of training."""
    for source in (run.source, *(each.source for each in run.evaluations.values())):
        if source.skips is not None:
            source.skips.hear()
    take_readings(run)
    smoothed = run.meters.summaries()
    figures = {name: summary["latest"] for name, summary in smoothed.items()} | run.precision.figures()
    run.observer.emit(Logged(run.progress.step, run.progress.epoch, figures, smoothed, clock_figures(run)))


def clock_figures(run: Run) -> dict[str, object]:
    """Speed, time left and memory: what depends on the machine; shares and memory are those of the worst process.

    The slowest process is the one that needs longest for its data and its forward passes, which wait for no other.
    """
    summaries = run.clock.summaries()
    step_time, data_time = summaries["step_time"], summaries["data_time"]
    steps_left = run.progress.total_steps - run.progress.step
    own = [data_time["mean"] / step_time["mean"], peak_memory(run.mesh.device) / 2**20, summaries["own_time"]["mean"]]
    ranks = torch.stack(run.mesh.gather(torch.tensor(own, dtype=torch.float64)))
    data_wait, memory, busy = ranks.max(0).values.tolist()
    figures = {
        "time": time.time(),
        "step_time": step_time,
        "data_time": data_time,
        "samples_per_second": summaries["samples"]["mean"] / step_time["mean"],
        "data_wait": data_wait,
        "memory_mb": memory,
        "eta_seconds": steps_left * step_time["median"],
    }
    if run.mesh.world > 1:
        figures |= {"slowest_rank": int(ranks[:, 2].argmax()), "slowest_by": busy / ranks[:, 2].mean().item()}
    return figures


def peak_memory(device: torch.device) -> int:
    """The most memory used so far, in bytes: of the device, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def evaluate_all(run: Run) -> None:
    """Measure on the split that guides training."""
    if "val" in run.evaluations:
        publish(run, evaluate_with_average(run, "val"))


def publish(run: Run, evaluation: Evaluation) -> None:
    """Record an evaluation's figures and draw its pictures."""
    if evaluation.split == "val" and "val" not in run.figures:
        _check_best(run, evaluation.figures)
    if evaluation.problem:
        run.observer.emit(Note(f"{evaluation.problem}; training goes on", "warning"))
    run.figures[evaluation.split] = evaluation.figures
    run.evaluated_step = run.progress.step
    confusion = evaluation.tables.get("confusion")
    run.observer.emit(
        Evaluated(
            run.progress.step,
            run.progress.epoch,
            evaluation.split,
            evaluation.figures,
            evaluation.num_samples,
            evaluation.num_skipped,
            clock={"seconds": evaluation.seconds, "time": time.time()},
            confusion=None if confusion is None else confusion.tolist(),
        )
    )
    draw_evaluation(run, evaluation)


def _check_best(run: Run, figures: Mapping[str, float]) -> None:
    best = run.store.best
    if best is not None and best not in figures:
        known = ", ".join(figures)
        run.observer.emit(
            Note(f"checkpoint.best: no figure is called {best!r}, so none is kept; there are {known}", "warning")
        )


def save_all(run: Run) -> None:
    """Begin a checkpoint of all that was recorded so far."""
    take_readings(run)
    save(run)
