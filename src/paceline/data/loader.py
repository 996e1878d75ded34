"""Batches in the order of the run: one stream of requests, answered in this process or by workers.

Threads start at once and need no copies, and decoding and our transforms run in parallel. Data sets and transforms that
draw from generators which threads share are read by processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from paceline.core.intervals import Progress
from paceline.core.process import num_cores
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.data.prefetch import explain_dead_workers as explain_dead_workers
from paceline.data.prefetch import load_by_processes, load_by_threads, prefetch_to_device
from paceline.data.sampler import BatchSampler, BatchSlice, Permutation, rank_slices
from paceline.data.split_loader import Request as Request
from paceline.data.split_loader import SplitLoader

_ALONE = World(0, 1, 0, torch.device("cpu"))


@dataclass(slots=True)
class MicroBatch:
    """Micro-batch `index` of step `step`, as this process holds it before its forward pass."""

    step: int
    index: int
    epoch: int
    batch: Batch
    is_padding: bool = False
    """Whether it is only computed to keep step with other processes, and counts nothing: it is another process's, or
    stands in for samples none of which can be read."""
    transformed: Batch | None = None
    """What `batch` becomes on the device, if that was needed before the forward pass."""


class StepBatch(NamedTuple):
    """What one optimizer step is made of: all micro-batches are counted, those of this process are held."""

    step: int
    num_samples: int
    num_micro_batches: int
    micro_batches: list[MicroBatch]


def load(
    source: SplitLoader,
    requests: Iterable[Request],
    workers: int | None,
    kind: Kind = "process",
    world: World = _ALONE,
) -> Iterator[Batch]:
    """A batch for each request, in order: the same with any kind and number of workers, but for DALI's own pixels.

    `workers` prefetch, threads or processes; 0 is this thread alone, None one for each core of this process's share.
    With `auto` they are threads. Data in memory is only read by workers if a kind is asked for.
    """
    cores = usable_cores(world.local_size)
    if kind == "dali":
        from paceline.data.dali import load_by_dali

        return load_by_dali(source, requests, workers or cores, world.device)
    if workers == 0 or kind == "memory" or (source.in_memory and kind == "auto"):
        return (source.fetch(request.epoch, request.ids) for request in requests)
    if kind == "process" or source.uses_global_rng:  # threads would draw from the generator of the training step
        return load_by_processes(source, requests, workers or cores)
    return load_by_threads(source, requests, workers or min(cores, _MOST_THREADS))


def automatic_workers(source: SplitLoader, world: World) -> int:
    """0 for data in memory, else one for each core of this process's share of the machine."""
    return 0 if source.in_memory else usable_cores(world.local_size)


_MAX_EVALUATION_BATCH = 256
_EVALUATED_VALUES = 1 << 22  # pixel values, over all channels, of an evaluation batch


def automatic_batch_size(loader: SplitLoader, is_cpu: bool) -> int:
    """A power of two, 256 at most: on a CPU as many samples as the first one's size leaves in the budget of a batch.

    A CPU evaluates a batch on each core, whose activations should not leave its cache. On machines of one kind it is a
    pure function of the data, so metrics do not depend on processes or restarts.
    """
    if not is_cpu:
        return _MAX_EVALUATION_BATCH
    num_values = int(loader.fetch(0, np.arange(1))["image"].numel())
    return 1 << (min(_MAX_EVALUATION_BATCH, max(1, _EVALUATED_VALUES // num_values)).bit_length() - 1)


Passes = Literal["own", "at_least_one", "equal"]
"""How many micro-batches a process computes: its own, at least one, or as many as every other."""


class _Planned(NamedTuple):
    epoch: int
    slices: list[BatchSlice]
    own: list[BatchSlice]
    padding: list[BatchSlice]


@dataclass
class TrainBatches:
    """The steps of a run from where its progress stands; iterating again goes on from there."""

    source: SplitLoader
    sampler: BatchSampler
    order: Permutation
    world: World
    progress: Progress
    workers: int | None = None
    """How many read ahead; None for one for each core."""
    passes: Passes = "own"
    kind: Kind = "auto"

    _last: tuple[int, _Planned | None] = (-1, None)

    def __post_init__(self) -> None:
        if self.source.in_memory and self.kind == "auto":
            self.workers = 0
        elif self.source.uses_global_rng and self.kind in ("auto", "thread"):
            self.kind = "process"

    def __iter__(self) -> Iterator[StepBatch]:
        steps = range(self.progress.step, self.progress.total_steps)
        with closing(self._load(steps)) as loaded:  # type: ignore[type-var]  # workers end with it
            batches = prefetch_to_device(loaded, self.world.device)
            for step in steps:
                epoch, slices, own, padding = self._plan(step)
                held = [MicroBatch(step, cut.index, epoch, next(batches)) for cut in (*own, *padding)]
                for place, each in enumerate(held):  # without a single readable sample, its own counts nothing either
                    if place >= len(own) or each.batch.is_placeholder:
                        each.is_padding = True
                yield StepBatch(step, slices[-1].stop - slices[0].start, len(slices), held)

    def load_step(self, step: int) -> StepBatch:
        """One step again, as it was."""
        again = replace(self, progress=replace(self.progress, step=step))
        again.workers = again.workers if self.kind == "dali" else 0
        with closing(iter(again)) as steps:  # type: ignore[type-var]
            return next(steps)

    def _load(self, steps: range) -> Iterator[Batch]:
        return load(self.source, self._requests(steps), self.workers, self.kind, self.world)

    def _requests(self, steps: range) -> Iterator[Request]:
        for step in steps:
            epoch, _, own, padding = self._plan(step)
            for cut in (*own, *padding):
                yield Request(epoch, self.order.at(epoch, cut.start, cut.stop))

    def _plan(self, step: int) -> _Planned:
        """What this process does in a step; requests without workers ask for the same one right afterwards."""
        number, plan = self._last
        if plan is None or number != step:
            slices = self.sampler.slices(step)
            own = rank_slices(slices, self.world.rank, self.world.size)
            missing = 0
            if self.passes != "own":
                wanted = 1 if self.passes == "at_least_one" else -(-len(slices) // self.world.size)
                missing = wanted - len(own)
            plan = _Planned(self.sampler.epoch(step), slices, own, slices[-1:] * missing)
            self._last = (step, plan)
        return plan


Kind = Literal["auto", "memory", "thread", "process", "dali"]
"""What loads samples."""

_MOST_THREADS = 16  # more get into each other's way wherever Python holds them


def usable_cores(shared_by: int = 1) -> int:
    """The cores of this process, if `shared_by` processes share those of the machine."""
    return max(1, num_cores() // shared_by)
