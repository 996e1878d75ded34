"""Batches in the order of the run: one stream of requests, answered in this process or by workers."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from paceline.core.errors import DataError, PacelineError
from paceline.core.mesh import Mesh
from paceline.core.progress import Progress
from paceline.data.batch import Batch
from paceline.data.sampler import Cut, Order, Updates, owned
from paceline.data.source import Ids, Source

_SHOWN = 32  # samples that a message lists


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
    """Whether it is only computed to keep step with other processes, and counts nothing: it is another process's, or
    stands in for samples none of which can be read."""


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
            held = [_held(step, cut, epoch, next(batches)) for cut in own]
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


def _held(step: int, cut: Cut, epoch: int, batch: Batch) -> MicroBatch:
    """A micro-batch of this process's own: without a single readable sample, it counts nothing either."""
    return MicroBatch(step, cut.index, epoch, batch, is_ghost=batch.is_stand_in)


class _Failure(NamedTuple):
    """A user's error on its way out of a worker, without the worker's traceback."""

    error: type[PacelineError]
    message: str


class _Answers(TorchDataset[Batch | _Failure]):
    """Answers requests inside a worker."""

    def __init__(self, source: Source, desks: Desks) -> None:
        self.source = source
        self.desks = desks

    def __getitem__(self, numbered: tuple[int, Request]) -> Batch | _Failure:
        number, request = numbered
        try:
            with self.desks.working_on(number):
                return self.source.fetch(request.epoch, request.ids)
        except PacelineError as error:
            return _Failure(type(error), str(error))


def _load_by_workers(source: Source, requests: Iterable[Request], workers: int) -> Iterator[Batch]:
    desks = Desks(workers)
    loader = DataLoader(
        _Answers(source, desks),
        sampler=desks.handed_out(requests),
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        prefetch_factor=4,
        pin_memory=torch.cuda.is_available(),
    )
    answers = iter(loader)
    try:
        with desks.open(), naming_dead_workers():
            for number, answer in enumerate(answers):
                desks.unanswered.pop(number)
                if isinstance(answer, _Failure):
                    raise answer.error(answer.message)
                yield answer
    finally:
        del answers  # so that workers end now: the traceback of an error would keep them, and later they end slowly


class Desks:
    """What each worker is reading, in memory that outlives the worker."""

    _all: ClassVar[list[Desks]] = []

    def __init__(self, workers: int) -> None:
        self._held = multiprocessing.RawArray("q", 2 * workers)  # of each worker, its process id and 1 + a number
        self.unanswered: dict[int, Request] = {}

    def handed_out(self, requests: Iterable[Request]) -> Iterator[tuple[int, Request]]:
        """The requests with their numbers, each kept until it is answered."""
        for numbered in enumerate(requests):
            self.unanswered[numbered[0]] = numbered[1]
            yield numbered

    @contextmanager
    def working_on(self, number: int) -> Iterator[None]:
        """Says, inside a worker, what it is busy with."""
        info = get_worker_info()
        assert info is not None
        self._held[2 * info.id : 2 * info.id + 2] = [os.getpid(), number + 1]
        try:
            yield
        finally:
            self._held[2 * info.id + 1] = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Surrounds the time in which workers may be asked after."""
        self._all.append(self)
        try:
            yield
        finally:
            self._all.remove(self)

    @classmethod
    def find(cls, worker: int) -> Request | None:
        """What the worker with this process id was reading."""
        for desks in cls._all:
            for place in range(0, len(desks._held), 2):
                if desks._held[place] == worker and desks._held[place + 1]:
                    return desks.unanswered.get(desks._held[place + 1] - 1)
        return None


@contextmanager
def naming_dead_workers() -> Iterator[None]:
    """Turn torch's word of a dead worker, which may come at any moment of a step, into a DataError."""
    try:
        yield
    except RuntimeError as error:
        died = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(?: is killed by signal: (\w+))?", str(error))
        if died is None:
            raise
        workers = [int(number) for number in died[1].split(",")]
        signal = f" of signal {died[2]}" if died[2] else ""
        busy = "; ".join(_occupation(worker) for worker in workers)
        hint = "the system's log may say why, often lack of memory"
        raise DataError(f"a loader worker died{signal}: {busy}; {hint}") from error


def _occupation(worker: int) -> str:
    request = Desks.find(worker)
    if request is None:
        return f"pid {worker}, between two batches"
    more = f" and {len(request.ids) - _SHOWN} more" if len(request.ids) > _SHOWN else ""
    samples = ", ".join(str(index) for index in request.ids[:_SHOWN])
    return f"pid {worker}, while it read the samples {samples}{more} of epoch {request.epoch}"


def _as_it_is(answer: Any) -> Any:
    return answer
