"""Batches read ahead by worker processes, and what is said when one of them dies."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from paceline.core.counting import listed
from paceline.core.errors import DataError, PacelineError
from paceline.data.batch import Batch
from paceline.data.loading.source import Request, Source

_SHOWN = 32  # samples that a message lists
_AHEAD = 4  # requests that each process may have before it


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


def load_by_processes(source: Source, requests: Iterable[Request], workers: int) -> Iterator[Batch]:
    """A batch for each request, in order, read ahead by that many processes."""
    desks = Desks(workers)
    loader = DataLoader(
        _Answers(source, desks),
        sampler=desks.handed_out(requests),
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        prefetch_factor=_AHEAD,
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
    return f"pid {worker}, while it read the samples {listed(request.ids, _SHOWN)} of epoch {request.epoch}"


def _as_it_is(answer: Any) -> Any:
    return answer
