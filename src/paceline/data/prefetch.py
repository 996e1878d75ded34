"""Batches read ahead by worker threads or processes, and copied ahead to a CUDA device."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from threading import current_thread, main_thread
from time import perf_counter, sleep
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from paceline.core.errors import DataError, PacelineError
from paceline.core.process import block_stop_signals, end_with_parent
from paceline.core.temporary import share_folder
from paceline.core.text import join_first
from paceline.core.torch_private import loader_workers, shut_down_workers
from paceline.data.batch import ON_HOST, Batch, map_tensors
from paceline.data.split_loader import Request, SplitLoader

T = TypeVar("T")
R = TypeVar("R")

_THREAD_PREFETCH = 2  # requests queued for each thread, the one it works on included
_PROCESS_PREFETCH = 4  # requests queued for each process
_PATIENCE = 5.0  # seconds until a worker that closed its connection has ended
_MAX_IDS = 32  # samples that a message lists


def map_in_order(work: Callable[[T], R], items: Iterable[T], threads: int, ahead: int) -> Iterator[R]:
    """What `work` gives for each item, in order, computed ahead by threads, which end with the iterator."""
    remaining = iter(items)
    with _pool(threads) as pool:
        waiting = deque(pool.submit(work, item) for item in islice(remaining, ahead))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(work, item) for item in islice(remaining, 1))
                yield result
        finally:
            for future in waiting:
                future.cancel()


def load_by_threads(source: SplitLoader, requests: Iterable[Request], workers: int) -> Iterator[Batch]:
    """A batch for each request, in order, prefetched by that many threads."""
    return map_in_order(partial(_fetch, source), requests, workers, _THREAD_PREFETCH * workers + 1)


def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="loader")


def _fetch(source: SplitLoader, request: Request) -> Batch:
    batch = source.fetch(request.epoch, request.ids)
    return batch.pin_memory() if torch.cuda.is_available() else batch


class _Failure(NamedTuple):
    """An error of the user's data on its way out of a worker, and the worker's traceback as text."""

    error: type[PacelineError]
    message: str
    lines: str


class _RequestDataset(TorchDataset[Batch | _Failure]):
    """Reads a request inside a worker process."""

    def __init__(self, source: SplitLoader, worker_status: WorkerStatus) -> None:
        self.source = source
        self.worker_status = worker_status

    def __getitem__(self, numbered: tuple[int, Request]) -> Batch | _Failure:
        number, request = numbered
        try:
            with self.worker_status.working_on(number):
                return self.source.fetch(request.epoch, request.ids)
        except PacelineError as error:
            return _Failure(type(error), str(error), traceback.format_exc())


def load_by_processes(source: SplitLoader, requests: Iterable[Request], workers: int) -> Iterator[Batch]:
    """A batch for each request, in order, prefetched by that many processes."""
    worker_status = WorkerStatus(workers)
    loader = DataLoader(
        _RequestDataset(source, worker_status),
        sampler=worker_status.number_requests(requests),
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,
        prefetch_factor=_PROCESS_PREFETCH,
        pin_memory=torch.cuda.is_available(),
        # Workers share the data set's memory and block signals as we do; from Python 3.14 on it is not the default.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        worker_init_fn=partial(_init_worker, is_main_thread=current_thread() is main_thread()),
    )
    share_folder()
    # Schedulers and terminals signal every process; a run that was asked to stop still needs its workers for a step.
    with block_stop_signals():
        answers = iter(loader)
    with worker_status.open(), explain_dead_workers():
        try:
            for number, answer in enumerate(answers):
                worker_status.pending.pop(number)
                if isinstance(answer, _Failure):
                    raise answer.error(answer.message) from RuntimeError(f"in a loader worker:\n{answer.lines}")
                yield answer
        except (EOFError, OSError) as error:  # memory of a worker that died could not be received
            dead = _wait_for_dead(loader_workers(answers))
            if dead is None:
                raise
            code = dead.exitcode or 0
            raise _dead_worker_error([dead.pid or 0], signal.strsignal(-code) if code < 0 else None) from error
        finally:
            # Now, and not when it is collected: the traceback of an error would keep the iterator, whose dead worker
            # torch reports again at any later signal of a child.
            shut_down_workers(answers)


def _init_worker(worker: int, is_main_thread: bool) -> None:
    """Inside a worker, which is started with stop signals blocked: end with the process that started it.

    It obeys a SIGTERM of its parent, and is killed as soon as its parent is gone: torch would look every few seconds.
    """
    parent = os.getppid()
    if is_main_thread:
        end_with_parent(parent)

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


class WorkerStatus:
    """What each worker is reading, in memory that outlives the worker."""

    _all: ClassVar[list[WorkerStatus]] = []

    def __init__(self, workers: int) -> None:
        self._held = multiprocessing.RawArray("q", 2 * workers)  # of each worker, its process id and 1 + a number
        self.pending: dict[int, Request] = {}

    def number_requests(self, requests: Iterable[Request]) -> Iterator[tuple[int, Request]]:
        """The requests with their numbers, each kept until its batch is there."""
        for numbered in enumerate(requests):
            self.pending[numbered[0]] = numbered[1]
            yield numbered

    @contextmanager
    def working_on(self, number: int) -> Iterator[None]:
        """Record, inside a worker, which request it reads."""
        info = get_worker_info()
        assert info is not None
        self._held[2 * info.id : 2 * info.id + 2] = [os.getpid(), number + 1]
        try:
            yield
        finally:
            self._held[2 * info.id + 1] = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Have `find` look here as long as the workers live."""
        self._all.append(self)
        try:
            yield
        finally:
            self._all.remove(self)

    @classmethod
    def find(cls, worker: int) -> Request | None:
        """What the worker with this process id was reading."""
        for worker_status in cls._all:
            for place in range(0, len(worker_status._held), 2):
                if worker_status._held[place] == worker and worker_status._held[place + 1]:
                    return worker_status.pending.get(worker_status._held[place + 1] - 1)
        return None


@contextmanager
def explain_dead_workers() -> Iterator[None]:
    """Re-raise torch's error of a dead worker as a DataError that says what the worker was reading."""
    try:
        yield
    except RuntimeError as error:
        died = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(?: is killed by signal: (\w+))?", str(error))
        if died is None:
            raise
        raise _dead_worker_error([int(number) for number in died[1].split(",")], died[2]) from error


def _dead_worker_error(workers: list[int], signal_name: str | None) -> DataError:
    of_signal = f" of signal {signal_name}" if signal_name else ""
    busy = "; ".join(_occupation(worker) for worker in workers)
    return DataError(f"a loader worker died{of_signal}: {busy}; the system log may say why, often a lack of memory")


def _wait_for_dead(workers: list[multiprocessing.Process]) -> multiprocessing.Process | None:
    """The first worker that has ended, or ends within a few seconds."""
    until = perf_counter() + _PATIENCE
    while perf_counter() < until:
        for worker in workers:
            if not worker.is_alive():
                return worker
        sleep(0.01)
    return None


def _occupation(worker: int) -> str:
    request = WorkerStatus.find(worker)
    if request is None:
        return f"pid {worker}, between two batches"
    return f"pid {worker}, while it read the samples {join_first(request.ids, _MAX_IDS)} of epoch {request.epoch}"


def _unchanged(batch: Any) -> Any:
    return batch


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches, copied to a CUDA device by a stream of its own; for any other device they stay where they are.

    The copy of a batch is queued while the device is still busy with the one before, and does not wait for it.
    """
    return _copy_ahead(batches, device) if device.type == "cuda" else batches


def _copy_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = batch.pin_memory().to(device)
        torch.cuda.current_stream(device).wait_stream(stream)
        for name in moved.keys() - ON_HOST:  # memory that one stream wrote is not reused until the other has read it
            map_tensors(moved[name], lambda tensor: tensor.record_stream(torch.cuda.current_stream(device)))
        yield moved
