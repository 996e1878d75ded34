"""Batches in the order of the run: one stream of requests, answered in this process or by workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from paceline.core.intervals import Progress
from paceline.core.world import World
from paceline.data.autotune import Kind, load_autotuned, usable_cores
from paceline.data.batch import Batch
from paceline.data.prefetch import explain_dead_workers as explain_dead_workers
from paceline.data.prefetch import prefetch_to_device
from paceline.data.sampler import BatchSampler, BatchSlice, Permutation, rank_slices
from paceline.data.split_loader import Request as Request
from paceline.data.split_loader import SplitLoader

_ALONE = World(0, 1, 0, torch.device("cpu"))


@dataclass(slots=True)
class MicroBatch:
    """Micro-batch `index` of update `step`, as this process holds it before its forward pass."""

    step: int
    index: int
    epoch: int
    batch: Batch
    is_padding: bool = False
    """Whether it is only computed to keep step with other processes, and counts nothing: it is another process's, or
    stands in for samples none of which can be read."""
    finished: Batch | None = None
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
    log: Callable[[str], None] | None = None,
) -> Iterator[Batch]:
    """A batch for each request, in order: the same with any kind and number of workers, but for DALI's own pixels.

    `workers` prefetch, threads or processes; 0 is this thread alone. With None, as many are used as a measurement of
    the first requests finds useful; with `auto`, it finds the kind too. `log` gets the outcome. Data in memory is only
    read by workers if a kind is asked for.
    """
    if kind == "dali":
        from paceline.data.dali import load_by_dali

        return load_by_dali(source, requests, workers or usable_cores(world.local_size), world.device)
    if workers == 0 or kind == "memory" or (source.in_memory and kind == "auto"):
        return (source.fetch(request.epoch, request.ids) for request in requests)
    if source.uses_global_rng:  # threads would draw from the generator of the training step
        kind = "process"
    return load_autotuned(source, requests, workers, kind, log or _ignore, usable_cores(world.local_size))


def automatic_workers(source: SplitLoader, world: World) -> int:
    """0 for data in memory, else one for each core of this process's share of the machine."""
    return 0 if source.in_memory else usable_cores(world.local_size)


def _ignore(text: str) -> None:
    pass


Passes = Literal["own", "some", "even"]
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
    updates: BatchSampler
    order: Permutation
    world: World
    progress: Progress
    workers: int | None
    """How many read ahead; None for as many as are found useful."""
    passes: Passes = "own"
    kind: Kind = "process"
    log: Callable[[str], None] | None = None
    """Gets, on the main process, how samples are loaded."""

    _last: tuple[int, _Planned | None] = (-1, None)

    def __iter__(self) -> Iterator[StepBatch]:
        steps = range(self.progress.step, self.progress.total_steps)
        with closing(self._load(steps)) as loaded:  # type: ignore[type-var]  # workers end with it
            batches = prefetch_to_device(loaded, self.world.device)
            for step in steps:
                epoch, slices, own, padding = self._plan(step)
                held = [_held(step, cut, epoch, next(batches)) for cut in own]
                held += [MicroBatch(step, cut.index, epoch, next(batches), is_padding=True) for cut in padding]
                yield StepBatch(step, slices[-1].stop - slices[0].start, len(slices), held)

    def _load(self, steps: range) -> Iterator[Batch]:
        log = self.log if self.world.is_main else None
        return load(self.source, self._requests(steps), self.workers, self.kind, self.world, log)

    def _requests(self, steps: range) -> Iterator[Request]:
        for step in steps:
            epoch, _, own, padding = self._plan(step)
            for cut in (*own, *padding):
                yield Request(epoch, self.order.at(epoch, cut.start, cut.stop))

    def _plan(self, step: int) -> _Planned:
        """What this process does in a step; requests without workers ask for the same one right afterwards."""
        number, plan = self._last
        if plan is None or number != step:
            slices = self.updates.slices(step)
            own = rank_slices(slices, self.world.rank, self.world.size)
            wanted = {"own": 0, "some": 1, "even": -(-len(slices) // self.world.size)}[self.passes]
            plan = _Planned(self.updates.epoch(step), slices, own, slices[-1:] * (wanted - len(own)))
            self._last = (step, plan)
        return plan


def _held(step: int, cut: BatchSlice, epoch: int, batch: Batch) -> MicroBatch:
    """A micro-batch of this process's own: without a single readable sample, it counts nothing either."""
    return MicroBatch(step, cut.index, epoch, batch, is_padding=batch.is_placeholder)
