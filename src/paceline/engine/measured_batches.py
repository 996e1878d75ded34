"""The batches of an evaluation, each measured alone: on a CPU several at once, in threads."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.core.generators import generator_states
from paceline.core.process import num_cores
from paceline.data.batch import Batch
from paceline.data.loader import Request, load
from paceline.data.rng import derive
from paceline.data.sampler import BatchSlice
from paceline.data.skip_list import Skipped
from paceline.engine.predictions import GuardedWriter, NoPredictions
from paceline.engine.replicas import KeptReplica, Replica, make_replicas
from paceline.engine.run import EvaluationSet, Run
from paceline.engine.visualizer import NoVisualizer, Visualizer
from paceline.metrics.metric import Metric, State
from paceline.tasks.task import Task

_STREAM = 0x4556  # keeps the seeds of evaluations apart from those of the steps


class MeasuredBatch(NamedTuple):
    """A measured batch without its images, which would take most of the memory."""

    ids: Tensor
    skipped: Sequence[Skipped]
    is_placeholder: bool
    states: list[State]


def measure_batches(
    run: Run,
    split_set: EvaluationSet,
    metrics: Sequence[Metric],
    slices: list[BatchSlice],
    writer: GuardedWriter | NoPredictions,
    visualizer: Visualizer | NoVisualizer,
) -> Generator[MeasuredBatch, None, None]:
    """Measure each batch, in order; what a part remembers or draws at random does not depend on the other batches.

    Threads share the generators of the process. From the first batch in which something draws, there is one thread.
    """
    original = Replica(run.model, run.task, metrics, run.state.parts)
    replicas: SimpleQueue[tuple[Replica, KeptReplica]] = SimpleQueue()
    for each in make_replicas(original, num_parallel(run, split_set)):
        replicas.put((each, KeptReplica(each)))
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
                writer.save(batch, predictions)
                visualizer.add(batch, predictions)
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
