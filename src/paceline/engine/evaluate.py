"""Evaluation on a whole split: each sample exactly once, bit-identical on any number of processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.core.errors import DataError, Stopped, UsageError
from paceline.core.generators import unchanged_generators
from paceline.core.process import resume_gc
from paceline.core.text import join_first, pluralize
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.data.loader import explain_dead_workers
from paceline.data.rng import derive
from paceline.data.sampler import BatchSlice, evaluation_slices, rank_slices
from paceline.engine.measured_batches import measure_batches, seed_batch
from paceline.engine.predictions import GuardedWriter, NoPredictions, make_writer
from paceline.engine.run import EvaluationSet, Run
from paceline.engine.stateful import unchanged
from paceline.engine.visualizer import Drawn, NoVisualizer, Visualizer
from paceline.engine.watchdog import EVALUATING
from paceline.loggers.events import EvaluationProgress, Snapshot
from paceline.metrics.metric import Metric, State, StateAccumulator, merge_states, pack, unpack
from paceline.optim.averaging import update_bn

_STATISTICS_UPDATES = 50
_AVERAGED = "averaged_"
_COMPUTING = 0x434F  # keeps the seed of what metrics draw when they are computed apart from the others
_AHEAD = 2  # batches that a process may be ahead of the slowest one

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one split, and some of its samples with their predictions, drawn."""

    split: str
    metrics: dict[str, float]
    tables: dict[str, Any]
    num_samples: int
    seconds: float
    drawn: Drawn
    num_skipped: int = 0
    """How many more samples the split has, which cannot be read."""
    problem: str | None = None
    """Why predictions could not be saved, or drawn."""


def evaluate(run: Run, split: str, prefix: str = "") -> Evaluation:
    """The metrics of the model on `split`. Raises Stopped on all ranks once one of them was asked to stop.

    `prefix` begins the names of the files of predictions.
    """
    if split not in run.evaluations:
        known = join_first(list(run.evaluations), 8)
        there = f"this run has {known}" if known else "this run has none: add data.val or data.test to its recipe"
        raise UsageError(f"there is no split {split!r} to evaluate on; {there}")
    resume_gc()
    run.heartbeat.beat(run.progress.step, EVALUATING)
    started = time.perf_counter()
    split_set, writer = run.evaluations[split], make_writer(run, split, prefix)
    metrics = [*run.task.metrics(), *writer.metrics]
    size = len(split_set.loader.dataset)
    visualizer = Visualizer(run, size)
    states, unread = collect_states(run, split, split_set, metrics, writer, visualizer)
    num_reported = len(metrics) - len(writer.metrics)
    values: dict[str, Any] = {}
    with unchanged_generators():
        run.world.seed(derive(run.seed, _COMPUTING))
        problem = writer.finish(states[num_reported:], unread)
        for metric, state in zip(metrics[:num_reported], states, strict=False):
            values |= metric.compute(state)
    return Evaluation(
        split,
        {name: _number(value) for name, value in values.items() if not isinstance(value, Tensor)},
        {name: value for name, value in values.items() if isinstance(value, Tensor)},
        size - len(unread),
        time.perf_counter() - started,
        visualizer.gather(),
        len(unread),
        problem or visualizer.problem,
    )


def collect_states(
    run: Run,
    split: str,
    split_set: EvaluationSet,
    metrics: Sequence[Metric],
    writer: GuardedWriter | NoPredictions,
    visualizer: Visualizer | NoVisualizer,
) -> tuple[list[State], list[int]]:
    """The state of each metric over all samples, and the ids of those that cannot be read: the same on all ranks."""
    size = len(split_set.loader.dataset)
    slices = evaluation_slices(size, split_set.batch_size)
    own = rank_slices(slices, run.world.rank, run.world.size)
    rounds = -(-len(slices) // run.world.size)
    padding = rounds - len(own) if run.strategy.passes == "equal" else 0
    accumulators, ids = [StateAccumulator() for _ in metrics], []
    skipped: list[int] = []
    run.strategy.share_buffers()
    with evaluation_mode(run, split_set.threads), explain_dead_workers():
        batches = measure_batches(run, split_set, metrics, own + slices[:1] * padding, writer, visualizer)
        for number, measured in enumerate(until_stopped(run, split, batches, rounds)):
            run.heartbeat.beat(run.progress.step, EVALUATING)
            run.logger.tick(_snapshot(run, EvaluationProgress(split, number + 1, rounds)))
            if number >= len(own):  # computed for the sake of processes that have more
                continue
            skipped += [each.sample for each in measured.skipped]
            if measured.is_placeholder:
                continue
            ids.append(measured.ids)
            for accumulator, state in zip(accumulators, measured.states, strict=True):
                accumulator.add(state)
    skipped_ids = torch.tensor(skipped, dtype=torch.int64)
    check_ledger(run.world, [*ids, skipped_ids], size)
    unread = torch.cat(run.world.gather(skipped_ids)).tolist() if split_set.loader.skips is not None else []
    return [_merge_ranks(run.world, accumulator.result()) for accumulator in accumulators], unread


def _snapshot(run: Run, evaluation: EvaluationProgress) -> Snapshot:
    return Snapshot(run.progress.step, run.progress.total_steps, run.progress.epoch, 0.0, evaluation)


def _number(value: Any) -> float:
    """A metric as it is logged: counts stay whole numbers."""
    return value if type(value) is int else float(value)


def evaluate_with_average(run: Run, split: str) -> Evaluation:
    """The metrics of the model and, if its weights are averaged, those of the average as `averaged_…`."""
    own = evaluate(run, split)
    if not run.averaging.is_ready:
        return own
    with averaged(run, split):
        average = evaluate(run, split, _AVERAGED)
    metrics = own.metrics | {f"{_AVERAGED}{name}": value for name, value in average.metrics.items()}
    problem = own.problem or average.problem
    return replace(own, metrics=metrics, seconds=own.seconds + average.seconds, problem=problem)


def until_stopped(
    run: Run, split: str, items: Generator[_Item, None, None], rounds: int
) -> Generator[_Item, None, None]:
    """At most one item a round; once a rank was asked to stop, all raise Stopped after the same round.

    What the processes tell each other travels while they compute: one that is a little ahead waits for nobody.
    """
    answers: deque[Callable[[], list[float]]] = deque()
    patience = _AHEAD if run.world.size > 1 else 0

    def check(num_open: int) -> None:
        while len(answers) > num_open:
            if answers.popleft()()[0]:
                where = f"while evaluating {split} after step {run.progress.step}"
                raise Stopped(f"stopped {where} {run.stop}; state is saved")

    with closing(items):
        for number in range(rounds):
            answers.append(run.world.start_sum([float(run.stop.requested)]))
            check(patience if number else 0)  # at first at once: a batch may take long
            yield from islice(items, 1)
        check(0)


@contextmanager
def averaged(run: Run, split: str) -> Iterator[None]:
    """Swap the averaged weights into the model, with BatchNorm statistics computed for them."""
    split_set = run.evaluations[split]
    with _in_place(run):
        if run.averaging.needs_statistics:
            slices = _first_cuts(run, split_set.batch_size)
            samples = until_stopped(run, split, _first_samples(run, slices), len(slices))
            with evaluation_mode(run, split_set.threads), run.precision.compute():
                update_bn(run.model, samples, lambda batch: run.task.predict(run.model, batch))
        yield


@contextmanager
def _in_place(run: Run) -> Iterator[None]:
    try:
        with run.averaging.swap_in(run.state.model):
            run.precision.sync_weights()
            yield
    finally:
        run.precision.sync_weights()


def _first_cuts(run: Run, batch: int) -> list[BatchSlice]:
    """The same training samples every time, sliced independently of the number of processes."""
    sampler = run.batches.sampler
    return evaluation_slices(min(sampler.size, _STATISTICS_UPDATES * sampler.batch), batch)


def _first_samples(run: Run, slices: list[BatchSlice]) -> Generator[Batch, None, None]:
    for cut in slices:
        fetched = run.train_loader.fetch(0, run.batches.order.at(0, cut.start, cut.stop))
        seed_batch(run, cut)
        yield run.train_loader.transform_batch(fetched, 0, run.world.device)


def check_ledger(world: World, ids: Sequence[Tensor], size: int) -> None:
    """Raise DataError unless all ranks together saw each of `size` samples exactly once."""
    own = torch.cat(list(ids)) if ids else torch.empty(0, dtype=torch.int64)
    seen = torch.bincount(torch.cat(world.gather(own)), minlength=size)
    if len(seen) == size and bool((seen == 1).all()):
        return
    missing, doubled = (seen == 0).nonzero().flatten().tolist(), (seen > 1).nonzero().flatten().tolist()
    raise DataError(
        f"evaluation did not see each of {pluralize(size, 'sample')} once: {len(missing)} missing {missing[:5]},"
        f" {len(doubled)} seen more than once {doubled[:5]}"
    )


def _merge_ranks(world: World, own: State) -> State:
    """Merge the states of all ranks; ranks hold batches in their order, so this keeps it."""
    return merge_states(unpack(part) for part in world.gather(pack(own)))


@contextmanager
def evaluation_mode(run: Run, threads: int) -> Iterator[None]:
    """Evaluation mode with a fixed number of threads per operation; they, generators and states are restored."""
    was_training, before = run.model.training, torch.get_num_threads()
    run.model.eval()
    torch.set_num_threads(threads)
    try:
        with unchanged_generators(), unchanged(run.state.parts):
            yield
    finally:
        run.strategy.reshard()
        torch.set_num_threads(before)
        if was_training:
            run.freezing.train_mode(run.model)
