"""Evaluation on a whole split: each sample exactly once, bit-identical on any number of processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import DataError, RecipeError, Stopped, UsageError
from paceline.core.generators import generator_states, unchanged_generators
from paceline.core.process import num_cores, resume_gc
from paceline.core.text import join_first, pluralize
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.data.loader import Request, explain_dead_workers, load
from paceline.data.rng import derive
from paceline.data.sampler import BatchSlice, evaluation_slices, rank_slices
from paceline.data.skip_list import Skipped
from paceline.engine.predictions import make_writers
from paceline.engine.run import EvaluationSet, Run
from paceline.engine.stateful import KeptState, Replica, keep_replica, make_replicas
from paceline.engine.visualizer import Drawn, Visualizer
from paceline.engine.watchdog import EVALUATING
from paceline.loggers.events import EvaluationProgress, Snapshot
from paceline.metrics.metric import Metric, State, StateAccumulator, merge_states, pack, unpack
from paceline.optim.averaging import update_bn
from paceline.tasks.task import Task

_STATISTICS_UPDATES = 50
_AVERAGED = "averaged_"
_STREAM = 0x4556  # keeps the seeds of evaluations apart from those of the steps
_COMPUTING = 0x434F  # keeps the seed of what metrics draw when they are computed apart from the others
_AHEAD = 2  # batches that a process may be ahead of the slowest one

_Item = TypeVar("_Item")
Keep = Callable[[Batch, Any], None]
"""Takes a batch and its predictions, each batch once, in any order, and in threads."""


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
    note: str = ""
    """What the files of predictions do not hold."""


class MeasuredBatch(NamedTuple):
    """A measured batch without its images, which would take most of the memory."""

    ids: Tensor
    skipped: Sequence[Skipped]
    is_placeholder: bool
    states: list[State]


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
    split_set, writers = run.evaluations[split], make_writers(run, split, prefix)
    metrics = [*run.task.metrics(), *writers.metrics]
    size = len(split_set.loader.dataset)
    visualizer = Visualizer(run, size)

    def keep(batch: Batch, predictions: Any) -> None:
        writers.save(batch, predictions)
        visualizer.add(batch, predictions)

    states, unread = collect_states(run, split, split_set, metrics, keep)
    num_reported = len(metrics) - len(writers.metrics)
    values: dict[str, Any] = {}
    with unchanged_generators():
        run.world.seed(derive(run.seed, _COMPUTING))
        problem = writers.finish(states[num_reported:])
        for metric, state in zip(metrics[:num_reported], states, strict=False):
            values |= metric.compute(state)
    numbers = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    return Evaluation(
        split,
        # counts stay whole numbers
        {name: value if type(value) is int else float(value) for name, value in numbers.items()},
        {name: value for name, value in values.items() if isinstance(value, Tensor)},
        size - len(unread),
        time.perf_counter() - started,
        visualizer.gather(),
        len(unread),
        problem or visualizer.problem,
        writers.note,
    )


def collect_states(
    run: Run,
    split: str,
    split_set: EvaluationSet,
    metrics: Sequence[Metric],
    keep: Keep,
) -> tuple[list[State], list[int]]:
    """The state of each metric over all samples, and the ids of those that cannot be read: the same on all ranks."""
    size, progress = len(split_set.loader.dataset), run.progress
    slices = evaluation_slices(size, split_set.batch_size)
    own = rank_slices(slices, run.world.rank, run.world.size)
    rounds = -(-len(slices) // run.world.size)
    padding = rounds - len(own) if run.strategy.passes == "equal" else 0
    accumulators, ids = [StateAccumulator() for _ in metrics], []
    skipped: list[int] = []
    run.strategy.share_buffers()
    with evaluation_mode(run, split_set.threads), explain_dead_workers():
        batches = measure_batches(run, split_set, metrics, own + slices[:1] * padding, keep)
        for number, measured in enumerate(until_stopped(run, split, batches, rounds)):
            run.heartbeat.beat(progress.step, EVALUATING)
            here = EvaluationProgress(split, number + 1, rounds)
            run.logger.tick(Snapshot(progress.step, progress.total_steps, progress.epoch, 0.0, here))
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
    # Ranks hold batches in their order, so merging keeps it.
    of_ranks = [run.world.gather(pack(accumulator.result())) for accumulator in accumulators]
    return [merge_states(map(unpack, packed)) for packed in of_ranks], unread


def measure_batches(
    run: Run,
    split_set: EvaluationSet,
    metrics: Sequence[Metric],
    slices: list[BatchSlice],
    keep: Keep,
) -> Generator[MeasuredBatch, None, None]:
    """Measure each batch, in order; what a part remembers or draws at random does not depend on the other batches.

    Threads share the generators of the process. From the first batch in which something draws, there is one thread.
    """
    original = Replica(run.model, run.task, metrics, run.state.parts)
    replicas: SimpleQueue[tuple[Replica, KeptState]] = SimpleQueue()
    for each in make_replicas(original, num_parallel(run, split_set)):
        replicas.put((each, keep_replica(each)))
    saved = set[int]()

    def measure(number: int, fetched: Batch, undrawn: object = None) -> MeasuredBatch | None:
        """None if the generators are no longer in the state `undrawn`."""
        ids, batch = fetched.ids, split_set.loader.transform_batch(fetched, 0, run.world.device)
        del fetched  # its images, of which the batch has normalized copies
        replica, kept = replicas.get()
        try:
            with without_gradient(run), run.precision.compute():
                predictions = replica.task.predict(replica.model, batch)
                states = [_update(metric, predictions, batch, replica.task) for metric in replica.metrics]
            if undrawn is not None and undrawn != generator_states():
                return None
            if not batch.is_placeholder and number not in saved:
                saved.add(number)
                keep(batch, predictions)
        finally:
            kept.restore()
            replicas.put((replica, kept))
        return MeasuredBatch(ids, batch.skipped, batch.is_placeholder, states)

    requests = [Request(0, np.arange(cut.start, cut.stop)) for cut in slices]
    done = 0
    if replicas.qsize() > 1:
        undrawn = generator_states()
        with ThreadPoolExecutor(replicas.qsize()) as pool:
            numbered = range(len(requests))
            for measured in pool.map(lambda n: measure(n, split_set.loader.fetch(*requests[n]), undrawn), numbered):
                if measured is None:
                    break
                yield measured
                done += 1
    for number, fetched in enumerate(load(split_set.loader, requests[done:], split_set.num_workers), done):
        seed_batch(run, slices[number])
        measured = measure(number, fetched)
        assert measured is not None
        yield measured


def _update(metric: Metric, predictions: Any, batch: Batch, task: Task) -> State:
    try:
        return metric.update(predictions, batch)
    except (AttributeError, TypeError) as error:
        if not type(metric).__module__.startswith("paceline.metrics") or type(predictions) is Tensor:
            raise
        found = f"{type(metric).__name__} cannot measure what the task {type(task).__name__} predicts"
        raise RecipeError(f"evaluate.metrics: {found} ({type(predictions).__name__}): {error}; leave it out") from error


def seed_batch(run: Run, cut: BatchSlice) -> None:
    """Have what a batch draws depend on the seed and its samples alone, not on the step."""
    run.world.seed(derive(run.seed, _STREAM, cut.start))


def without_gradient(run: Run) -> AbstractContextManager[object]:
    """Disable gradients inside, in the cheapest way that the strategy allows."""
    # Sharded weights that are first put together in the inference mode could not be used outside of it.
    return torch.no_grad() if run.strategy.passes == "equal" else torch.inference_mode()


def num_parallel(run: Run, split_set: EvaluationSet) -> int:
    """The number of batches measured in parallel; threads per operation stay fixed, so results do not change."""
    is_alone = split_set.num_workers or split_set.loader.uses_global_rng
    if run.world.device.type != "cpu" or is_alone or run.strategy.passes == "equal":
        return 1
    return max(1, num_cores() // run.world.local_size // split_set.threads)


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
    try:
        with run.averaging.swap_in(run.state.model):
            run.precision.sync_weights()
            if run.averaging.needs_statistics:
                sampler = run.batches.sampler  # the same training samples, whatever the number of processes
                slices = evaluation_slices(min(sampler.size, _STATISTICS_UPDATES * sampler.batch), split_set.batch_size)
                samples = until_stopped(run, split, _training_samples(run, slices), len(slices))
                with evaluation_mode(run, split_set.threads), run.precision.compute():
                    update_bn(run.model, samples, lambda batch: run.task.predict(run.model, batch))
            yield
    finally:
        run.precision.sync_weights()


def _training_samples(run: Run, slices: list[BatchSlice]) -> Generator[Batch, None, None]:
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


@contextmanager
def evaluation_mode(run: Run, threads: int) -> Iterator[None]:
    """Evaluation mode with a fixed number of threads per operation; they, generators and states are restored."""
    was_training, before = run.model.training, torch.get_num_threads()
    run.model.eval()
    torch.set_num_threads(threads)
    try:
        with unchanged_generators(), KeptState((), run.state.parts):
            yield
    finally:
        run.strategy.reshard()
        torch.set_num_threads(before)
        if was_training:
            run.freezing.train_mode(run.model)
