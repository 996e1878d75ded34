"""Measuring a model on a whole split: each sample exactly once, the same bits on any number of processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from paceline.engine.predictions import PredictionFolder
from paceline.engine.run import EvaluationSet, Run
from paceline.metrics.state import Folding, Metric, State, fold, pack, unpack
from paceline.optim.averaging import update_bn

_STATISTICS_UPDATES = 50


@dataclass(frozen=True)
class Evaluation:
    """The figures of one split, and its first batch with predictions to draw on the process that saw it."""

    split: str
    figures: dict[str, float]
    tables: dict[str, Any]
    num_samples: int
    seconds: float
    first: tuple[Batch, Any] | None
    num_skipped: int = 0
    """How many more samples the split has, which cannot be read."""


class _Measured(NamedTuple):
    fetched: Batch
    states: list[State]
    kept: tuple[Batch, Any] | None


def evaluate(run: Run, split: str) -> Evaluation:
    """The figures of the model on `split`."""
    garbage.resume()
    started = time.perf_counter()
    examined, metrics = run.evaluations[split], run.task.metrics()
    size = len(examined.source.dataset)
    cuts = evaluation_cuts(size, examined.batch)
    own = owned(cuts, run.mesh.rank, run.mesh.world)
    ghosts = -(-len(cuts) // run.mesh.world) - len(own) if run.parallel.passes == "even" else 0
    foldings, ids, first = [Folding() for _ in metrics], [], None
    skipped: list[int] = []
    run.parallel.share_buffers()
    with measuring(run, examined.threads), naming_dead_workers():
        for number, measured in enumerate(_measure_all(run, examined, metrics, own + cuts[:1] * ghosts)):
            run.heartbeat.beat(run.progress.step, "evaluating")
            if number >= len(own):  # computed for the sake of processes that have more
                continue
            skipped += [each.sample for each in measured.fetched.skipped]
            if measured.fetched.is_stand_in:
                continue
            ids.append(measured.fetched.ids)
            first = first or measured.kept
            for folding, state in zip(foldings, measured.states, strict=True):
                folding.add(state)
    left_out = torch.tensor(skipped, dtype=torch.int64)
    check_ledger(run.mesh, [*ids, left_out], size)
    num_skipped = sum(len(part) for part in run.mesh.gather(left_out)) if examined.source.skips is not None else 0
    figures: dict[str, Any] = {}
    for metric, folding in zip(metrics, foldings, strict=True):
        figures |= metric.figures(_of_all_processes(run.mesh, folding.result()))
    return Evaluation(
        split,
        {name: float(value) for name, value in figures.items() if not isinstance(value, Tensor)},
        {name: value for name, value in figures.items() if isinstance(value, Tensor)},
        size - num_skipped,
        time.perf_counter() - started,
        first,
        num_skipped,
    )


def evaluate_with_average(run: Run, split: str) -> Evaluation:
    """The figures of the model and, if there is an average of its weights, beside them those of it as `averaged_…`."""
    own = evaluate(run, split)
    if not run.averaging.is_ready:
        return own
    with averaged(run, run.evaluations[split]):
        average = evaluate(run, split)
    figures = own.figures | {f"averaged_{name}": value for name, value in average.figures.items()}
    return replace(own, figures=figures, seconds=own.seconds + average.seconds)


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


def _measure_all(run: Run, examined: EvaluationSet, metrics: Sequence[Metric], cuts: list[Cut]) -> Iterator[_Measured]:
    """Measure each batch, in order: on a CPU several at once, each in a thread that also reads its samples."""

    keeper = _prediction_folder(run, examined)

    def measure(cut: Cut, fetched: Batch) -> _Measured:
        batch = examined.source.finish(fetched, 0, run.mesh.device)
        with torch.inference_mode(), run.precision.compute():
            predictions = run.task.predict(run.model, batch)
            states = [metric.measure(predictions, batch) for metric in metrics]
        if keeper is not None and not fetched.is_stand_in:
            keeper.save(batch, predictions)
        is_drawn = cut.index == 0 and not fetched.is_stand_in
        return _Measured(fetched, states, (batch, predictions) if is_drawn else None)

    requests = [Request(0, np.arange(cut.start, cut.stop)) for cut in cuts]
    lanes = _lanes(run, examined)
    if lanes == 1:
        yield from map(measure, cuts, load(examined.source, requests, examined.workers))
        return
    with ThreadPoolExecutor(lanes) as pool:
        yield from pool.map(lambda cut, request: measure(cut, examined.source.fetch(*request)), cuts, requests)


def _prediction_folder(run: Run, examined: EvaluationSet) -> PredictionFolder | None:
    if not run.save_predictions:
        return None
    split = next(name for name, each in run.evaluations.items() if each is examined)
    return PredictionFolder(run.out / "predictions" / split, examined.source.dataset, run.task)


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
