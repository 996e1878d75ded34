"""Batches in the order of the run: one stream of requests, answered in this process or by workers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from paceline.core.errors import DataError, PacelineError
from paceline.core.mesh import Mesh
from paceline.core.progress import Progress
from paceline.data.batch import Batch
from paceline.data.sampler import Cut, Order, Updates, owned
from paceline.data.source import Ids, Source


class Request(NamedTuple):
    """Samples that are wanted together."""

    epoch: int
    ids: Ids


@dataclass(slots=True)
class MicroBatch:
    """Micro-batch `index` of update `step`, as this process holds it before its forward pass."""

    step: int
    index: int
    epoch: int
    batch: Batch
    is_ghost: bool = False
    """Whether it belongs to another process, and is only computed to keep step with the others: it counts nothing."""


class Update(NamedTuple):
    """What one optimizer update is made of: all micro-batches are counted, this process's own are held."""

    step: int
    num_samples: int
    num_microbatches: int
    microbatches: list[MicroBatch]


def load(source: Source, requests: Iterable[Request], workers: int) -> Iterator[Batch]:
    """A batch for each request, in order; with workers, read ahead by that many processes."""
    if workers == 0:
        return (source.fetch(request.epoch, request.ids) for request in requests)
    return _load_by_workers(source, requests, workers)


def automatic_workers(source: Source, mesh: Mesh) -> int:
    """None for what lies in memory, else a process for each core of this process's share of the machine."""
    return 0 if source.in_memory else max(1, len(os.sched_getaffinity(0)) // mesh.local_world)


Passes = Literal["own", "some", "even"]
"""How many micro-batches a process computes: its own, at least one, or as many as every other."""


class _Planned(NamedTuple):
    epoch: int
    cuts: list[Cut]
    own: list[Cut]
    ghosts: list[Cut]


@dataclass
class TrainBatches:
    """The updates of a run from where its progress stands; iterating again goes on from there."""

    source: Source
    updates: Updates
    order: Order
    mesh: Mesh
    progress: Progress
    workers: int
    passes: Passes = "own"

    _last: tuple[int, _Planned | None] = (-1, None)

    def __iter__(self) -> Iterator[Update]:
        steps = range(self.progress.step, self.progress.total_steps)
        batches = load(self.source, self._requests(steps), self.workers)
        for step in steps:
            epoch, cuts, own, ghosts = self._plan(step)
            held = [MicroBatch(step, cut.index, epoch, next(batches)) for cut in own]
            held += [MicroBatch(step, cut.index, epoch, next(batches), is_ghost=True) for cut in ghosts]
            yield Update(step, cuts[-1].stop - cuts[0].start, len(cuts), held)

    def _requests(self, steps: range) -> Iterator[Request]:
        for step in steps:
            epoch, _, own, ghosts = self._plan(step)
            for cut in (*own, *ghosts):
                yield Request(epoch, self.order.at(epoch, cut.start, cut.stop))

    def _plan(self, step: int) -> _Planned:
        """What this process does in a step; requests without workers ask for the same one right afterwards."""
        number, plan = self._last
        if plan is None or number != step:
            cuts = self.updates.cuts(step)
            own = owned(cuts, self.mesh.rank, self.mesh.world)
            wanted = {"own": 0, "some": 1, "even": -(-len(cuts) // self.mesh.world)}[self.passes]
            plan = _Planned(self.updates.epoch(step), cuts, own, cuts[-1:] * (wanted - len(own)))
            self._last = (step, plan)
        return plan


class _Failure(NamedTuple):
    """A user's error on its way out of a worker, without the worker's traceback."""

    error: type[PacelineError]
    message: str


class _Answers(TorchDataset[Batch | _Failure]):
    """Answers requests inside a worker."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, request: Request) -> Batch | _Failure:
        try:
            return self.source.fetch(request.epoch, request.ids)
        except PacelineError as error:
            return _Failure(type(error), str(error))


def _load_by_workers(source: Source, requests: Iterable[Request], workers: int) -> Iterator[Batch]:
    loader = DataLoader(
        _Answers(source),
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        prefetch_factor=4,
        pin_memory=torch.cuda.is_available(),
    )
    with naming_dead_workers():
        for answer in loader:
            if isinstance(answer, _Failure):
                raise answer.error(answer.message)
            yield answer


@contextmanager
def naming_dead_workers() -> Iterator[None]:
    """Turn torch's word of a dead worker, which may come at any moment of a step, into a DataError."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        hint = "the system's log may say why, often lack of memory"
        raise DataError(f"a loader worker died ({error}); {hint}") from error


def _as_it_is(answer: Any) -> Any:
    return answer
