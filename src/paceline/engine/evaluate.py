"""Measuring a model on a whole split: each sample exactly once, the same bits on any number of processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core import garbage
from paceline.core.counting import counted
from paceline.core.errors import DataError
from paceline.core.mesh import Mesh
from paceline.data.batch import Batch
from paceline.data.loading.loader import Request, load, naming_dead_workers
from paceline.data.sampler import Cut, evaluation_cuts, owned
from paceline.engine.exhibits import Exhibit, assemble, drawn, pick
from paceline.engine.predictions import Keeping, NoPredictions, make_keeper
from paceline.engine.run import EvaluationSet, Run
from paceline.metrics.state import Folding, Metric, State, fold, pack, unpack
from paceline.optim.averaging import update_bn

_STATISTICS_UPDATES = 50


@dataclass(frozen=True)
class Evaluation:
    """The figures of one split, and on the first process some of its samples with predictions to draw."""

    split: str
    figures: dict[str, float]
    tables: dict[str, Any]
    num_samples: int
    seconds: float
    pictured: tuple[Batch, Any] | None
    num_skipped: int = 0
    """How many more samples the split has, which cannot be read."""
    problem: str | None = None
    """Why predictions could not be saved."""


class _Measured(NamedTuple):
    fetched: Batch
    states: list[State]
    kept: list[Exhibit]


def evaluate(run: Run, split: str) -> Evaluation:
    """The figures of the model on `split`."""
    garbage.resume()
    started = time.perf_counter()
    examined, keeper = run.evaluations[split], make_keeper(run, split)
    metrics = [*run.task.metrics(), *keeper.metrics]
    size = len(examined.source.dataset)
    cuts = evaluation_cuts(size, examined.batch)
    own = owned(cuts, run.mesh.rank, run.mesh.world)
    ghosts = -(-len(cuts) // run.mesh.world) - len(own) if run.parallel.passes == "even" else 0
    foldings, ids = [Folding() for _ in metrics], []
    skipped: list[int] = []
    kept: list[Exhibit] = []
    run.parallel.share_buffers()
    with measuring(run, examined.threads), naming_dead_workers():
        for number, measured in enumerate(_measure_all(run, examined, metrics, own + cuts[:1] * ghosts, keeper)):
            run.heartbeat.beat(run.progress.step, "evaluating")
            if number >= len(own):  # computed for the sake of processes that have more
                continue
            skipped += [each.sample for each in measured.fetched.skipped]
            if measured.fetched.is_stand_in:
                continue
            ids.append(measured.fetched.ids)
            kept += measured.kept
            for folding, state in zip(foldings, measured.states, strict=True):
                folding.add(state)
    left_out = torch.tensor(skipped, dtype=torch.int64)
    check_ledger(run.mesh, [*ids, left_out], size)
    unread = torch.cat(run.mesh.gather(left_out)).tolist() if examined.source.skips is not None else []
    states = [_of_all_processes(run.mesh, folding.result()) for folding in foldings]
    num_figures = len(metrics) - len(keeper.metrics)
    problem = keeper.finish(states[num_figures:], unread)
    figures: dict[str, Any] = {}
    for metric, state in zip(metrics[:num_figures], states, strict=False):
        figures |= metric.figures(state)
    return Evaluation(
        split,
        {name: _number(value) for name, value in figures.items() if not isinstance(value, Tensor)},
        {name: value for name, value in figures.items() if isinstance(value, Tensor)},
        size - len(unread),
        time.perf_counter() - started,
        assemble(run.mesh, kept) if run.pictures else None,
        len(unread),
        problem,
    )


def _number(value: Any) -> float:
    """A figure as it is told: counts stay whole numbers."""
    return value if type(value) is int else float(value)


def evaluate_with_average(run: Run, split: str) -> Evaluation:
    """The figures of the model and, if there is an average of its weights, beside them those of it as `averaged_…`."""
    own = evaluate(run, split)
    if not run.averaging.is_ready:
        return own
    with averaged(run, run.evaluations[split]):
        average = evaluate(run, split)
    figures = own.figures | {f"averaged_{name}": value for name, value in average.figures.items()}
    problem = own.problem or average.problem
    return replace(own, figures=figures, seconds=own.seconds + average.seconds, problem=problem)


@contextmanager
def averaged(run: Run, examined: EvaluationSet) -> Iterator[None]:
    """Have the model hold the average of its weights, with BatchNorm statistics that belong to it."""
    with _in_place(run):
        if run.averaging.needs_statistics:
            samples = _first_samples(run, examined.batch)
            with measuring(run, examined.threads), run.precision.compute():
                update_bn(run.model, samples, lambda batch: run.task.predict(run.model, batch))
        yield


@contextmanager
def _in_place(run: Run) -> Iterator[None]:
    run.saver.release()
    try:
        with run.averaging.applied(run.masters):
            run.precision.publish()
            yield
    finally:
        run.precision.publish()


def _first_samples(run: Run, batch: int) -> Iterator[Batch]:
    """Some training samples, always the same ones, cut without regard to processes."""
    updates = run.batches.updates
    for cut in evaluation_cuts(min(updates.size, _STATISTICS_UPDATES * updates.batch), batch):
        fetched = run.source.fetch(0, run.batches.order.at(0, cut.start, cut.stop))
        yield run.source.finish(fetched, 0, run.mesh.device)


def _measure_all(
    run: Run, examined: EvaluationSet, metrics: Sequence[Metric], cuts: list[Cut], keeper: Keeping | NoPredictions
) -> Iterator[_Measured]:
    """Measure each batch, in order: on a CPU several at once, each in a thread that also reads its samples."""
    wanted = drawn(len(examined.source.dataset), run.task) if run.pictures else ()

    def measure(fetched: Batch) -> _Measured:
        batch = examined.source.finish(fetched, 0, run.mesh.device)
        with without_gradient(run), run.precision.compute():
            predictions = run.task.predict(run.model, batch)
            states = [metric.measure(predictions, batch) for metric in metrics]
        if not fetched.is_stand_in:
            keeper.save(batch, predictions)
        return _Measured(fetched, states, pick(wanted, run.task, batch, predictions))

    requests = [Request(0, np.arange(cut.start, cut.stop)) for cut in cuts]
    lanes = _lanes(run, examined)
    if lanes == 1:
        yield from map(measure, load(examined.source, requests, examined.workers))
        return
    with ThreadPoolExecutor(lanes) as pool:
        yield from pool.map(lambda request: measure(examined.source.fetch(*request)), requests)


def without_gradient(run: Run) -> AbstractContextManager[object]:
    """No gradient is computed inside, in the cheapest way that the strategy allows."""
    # Sharded weights that are first put together in the inference mode could not be used outside of it.
    return torch.no_grad() if run.parallel.passes == "even" else torch.inference_mode()


def _lanes(run: Run, examined: EvaluationSet) -> int:
    """How many batches are measured at once; operations keep their own number of threads, so results do not change."""
    if run.mesh.device.type != "cpu" or examined.workers or run.parallel.passes == "even":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // run.mesh.local_world // examined.threads)


def check_ledger(mesh: Mesh, ids: Sequence[Tensor], size: int) -> None:
    """Raise unless all processes together saw each of `size` samples exactly once."""
    own = torch.cat(list(ids)) if ids else torch.empty(0, dtype=torch.int64)
    seen = torch.bincount(torch.cat(mesh.gather(own)), minlength=size)
    if len(seen) == size and bool((seen == 1).all()):
        return
    missing, doubled = (seen == 0).nonzero().flatten().tolist(), (seen > 1).nonzero().flatten().tolist()
    raise DataError(
        f"evaluation did not see each of {counted(size, 'sample')} once: {len(missing)} missing {missing[:5]},"
        f" {len(doubled)} seen more than once {doubled[:5]}"
    )


def _of_all_processes(mesh: Mesh, own: State) -> State:
    """Fold the states of the processes; ranks hold batches in their order, so this keeps it."""
    return fold(unpack(part) for part in mesh.gather(pack(own)))


@contextmanager
def measuring(run: Run, threads: int) -> Iterator[None]:
    """Evaluation mode and a fixed number of threads per operation; both are put back afterwards."""
    was_training, before = run.model.training, torch.get_num_threads()
    run.model.eval()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        run.parallel.release()
        torch.set_num_threads(before)
        if was_training:
            run.freezing.train_mode(run.model)
