"""Batches read ahead by worker threads or processes, and copied ahead to a CUDA device."""

from __future__ import annotations

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
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from paceline.core.errors import DataError, PacelineError
from paceline.core.process import block_stop_signals, end_with_parent
from paceline.core.temporary import share_folder
from paceline.data.batch import ON_HOST, Batch, map_tensors
from paceline.data.split_loader import Request, SplitLoader

T = TypeVar("T")
R = TypeVar("R")

_THREAD_PREFETCH = 2  # requests queued for each thread, the one it works on included
_PROCESS_PREFETCH = 4  # requests queued for each process


def map_in_order(work: Callable[[T], R], items: Iterable[T], threads: int, ahead: int) -> Iterator[R]:
    """What `work` gives for each item, in order, computed ahead by threads, which end with the iterator."""
    remaining = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="loader") as pool:
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

    def __init__(self, source: SplitLoader) -> None:
        self.source = source

    def __getitem__(self, request: Request) -> Batch | _Failure:
        try:
            return self.source.fetch(request.epoch, request.ids)
        except PacelineError as error:
            return _Failure(type(error), str(error), traceback.format_exc())


def load_by_processes(source: SplitLoader, requests: Iterable[Request], workers: int) -> Iterator[Batch]:
    """A batch for each request, in order, prefetched by that many processes."""
    loader = DataLoader(
        _RequestDataset(source),
        sampler=requests,
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
    with explain_dead_workers():
        try:
            for answer in answers:
                if isinstance(answer, _Failure):
                    raise answer.error(answer.message) from RuntimeError(f"in a loader worker:\n{answer.lines}")
                yield answer
        except (EOFError, ConnectionError, FileNotFoundError) as error:  # memory of a dead worker cannot be received
            raise _dead_worker_error(None) from error
        finally:
            # Now, and not when it is collected: the traceback of an error would keep the iterator, whose dead worker
            # torch reports again at any later signal of a child.
            answers._shutdown_workers()  # type: ignore[attr-defined]


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


@contextmanager
def explain_dead_workers() -> Iterator[None]:
    """Re-raise torch's error of a dead worker as a DataError that says what to do."""
    try:
        yield
    except RuntimeError as error:
        died = re.search(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\)(?: is killed by signal: (\w+))?", str(error))
        if died is None:
            raise
        raise _dead_worker_error(died[1]) from error


def _dead_worker_error(signal_name: str | None) -> DataError:
    of_signal = f" of signal {signal_name}" if signal_name else ""
    advice = "often a lack of memory; fewer workers (data.num_workers) need less"
    return DataError(f"a loader worker died{of_signal}: the system log may say why, {advice}")


def _unchanged(batch: Any) -> Any:
    return batch


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches, copied to a CUDA device by a stream of its own; for any other device they stay where they are.

    The copy of a batch is queued while the device is still busy with the one before, and does not wait for it.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = batch.pin_memory().to(device)
        torch.cuda.current_stream(device).wait_stream(stream)
        for name in moved.keys() - ON_HOST:  # memory that one stream wrote is not reused until the other has read it
            map_tensors(moved[name], lambda tensor: tensor.record_stream(torch.cuda.current_stream(device)))
        yield moved
