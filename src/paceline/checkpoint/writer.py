"""Asynchronous saves: a snapshot into a reused host buffer, then a low-priority writer thread."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from ctypes import memmove
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from threading import Event, Lock, Thread

import torch
from torch import Tensor

from paceline.checkpoint.files import TensorFile
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.shards import SaveRank, TensorShard
from paceline.checkpoint.state import Tree
from paceline.checkpoint.store import Saved, Store
from paceline.core.errors import CheckpointError
from paceline.core.process import num_cores

_NICENESS = 10


@dataclass(frozen=True)
class SaveResult:
    """A finished save: committed at `path`, or failed with `error`."""

    step: int
    path: Path
    num_bytes: int
    """The size of the files."""
    is_best: bool = False
    error: str | None = None
    blocked: float = 0.0
    """Seconds that training waited for the snapshot."""
    waited: float = 0.0
    """Seconds that training waited before, for an earlier save."""
    seconds: float = 0.0
    """Seconds of writing, in the background."""


class Saver:
    """Saves one checkpoint at a time to a store, from its own thread.

    A failed save is a result, not an exception: earlier checkpoints are unchanged, and the next save tries again. Each
    rank that writes shards has a saver; `token` is equal on all of them and new for every start of the run.
    """

    def __init__(self, store: Store, rank: int = 0, world_size: int = 1, token: str = "") -> None:
        self.store = store
        self._rank = SaveRank(rank, world_size, token)
        self._buffer = HostBuffer()
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._results: deque[SaveResult] = deque()
        self._failure: BaseException | None = None
        self._num_started = 0
        self._started_step: int | None = None
        self.has_failed = False
        """Whether the last finished save failed."""

    @property
    def last_step(self) -> int | None:
        """The step of the save last started, or the one that the store found."""
        return self.store.last_step if self._started_step is None else self._started_step

    def reserve(self, model: Mapping[str, Tensor | TensorShard], state: Tree) -> None:
        """Allocate the buffer for a save like this one, in the background."""
        files = self._gather(0, model, state, {}).tensors.values()
        size, is_pinned = num_bytes(files), any(tensor.is_cuda for file in files for tensor in file.tensors.values())
        self._run_in_background(lambda: self._buffer.take(size, is_pinned))

    def start(
        self,
        step: int,
        model: Mapping[str, Tensor | TensorShard],
        state: Tree,
        metrics: Mapping[str, float],
        deferred: Iterable[Tensor] = (),
    ) -> None:
        """Copy everything, then write it in the background. Waits for an earlier save to finish.

        Tensors in `deferred` are copied after the return: do not change them before calling `finish_copy`.
        """
        started = time.perf_counter()
        self.finish_copy()
        self._join()
        waited = time.perf_counter() - started
        content = self._gather(step, model, state, metrics)
        snapshot = Snapshot(content.tensors.values(), self._buffer, {tensor.data_ptr() for tensor in deferred})
        content.pieces |= dict(zip(content.tensors, snapshot.views, strict=True))
        result = SaveResult(step, self.store.path_of(step), content.size, waited=waited)
        self._snapshot = snapshot
        self._started_step = step
        self._num_started += 1
        blocked = time.perf_counter() - started - waited
        self._run_in_background(lambda: self._write(content, snapshot, replace(result, blocked=blocked)))

    def finish_copy(self) -> None:
        """Finish copying `deferred` tensors, so that they may change."""
        if self._snapshot is not None:
            self._snapshot.copy_job.finish()
            self._snapshot = None

    def poll(self) -> list[SaveResult]:
        """The saves that finished since the last call; never waits."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return [self._results.popleft() for _ in range(len(self._results))]

    def finish(self) -> list[SaveResult]:
        """Wait for the save in progress; then as `poll`."""
        self._join()
        return self.poll()

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> Saved | None:
        """Add metrics to the checkpoint of a step, if this rank commits it and it was saved; see `Store`."""
        self._join()
        if self._rank.rank or self.has_failed or self.last_step != step:
            return None
        return self.store.record_metrics(step, metrics)

    def _gather(
        self, step: int, model: Mapping[str, Tensor | TensorShard], state: Tree, metrics: Mapping[str, float]
    ) -> Folder:
        attempt = f"{self._rank.attempt}.{self._num_started}"
        return Folder(step, model, state, metrics, replace(self._rank, attempt=attempt))

    def _run_in_background(self, work: Callable[[], object]) -> None:
        self._join()
        self._thread = threading.Thread(target=self._run, args=(work,), name="paceline-saver")
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by `poll`
            self._failure = error

    def _write(self, content: Folder, snapshot: Snapshot, result: SaveResult) -> None:
        started = time.perf_counter()
        try:
            snapshot.wait()  # at normal priority: training may be about to wait for it
            content.tensors.clear()  # frees copies that were made for this save
            _lower_priority()
            saved = self.store.write(content)
            result = replace(result, is_best=saved.is_best)
        except (CheckpointError, OSError) as error:
            result = replace(result, error=str(error))
        self.has_failed = result.error is not None
        self._results.append(replace(result, seconds=time.perf_counter() - started))


class NoSaver:
    """The saver of a rank that writes nothing."""

    has_failed = False

    def __init__(self, store: Store) -> None:
        self.store = store
        self._started_step: int | None = None

    @property
    def last_step(self) -> int | None:
        """As `Saver.last_step`, equal on all ranks."""
        return self.store.last_step if self._started_step is None else self._started_step

    def reserve(self, model: Mapping[str, Tensor | TensorShard], state: Tree) -> None:
        """Do nothing."""

    def start(
        self,
        step: int,
        model: Mapping[str, Tensor | TensorShard],
        state: Tree,
        metrics: Mapping[str, float],
        deferred: Iterable[Tensor] = (),
    ) -> None:
        """Record the step."""
        self._started_step = step

    def finish_copy(self) -> None:
        """Do nothing."""

    def poll(self) -> list[SaveResult]:
        """Nothing."""
        return []

    def finish(self) -> list[SaveResult]:
        """Nothing."""
        return []

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> Saved | None:
        """Nothing."""
        return None


def _lower_priority() -> None:
    """Give this thread a lower priority than those that train."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


_CHUNK = 1 << 20
_ALIGNMENT = 64
_COPY_THREADS = min(3, num_cores() - 1)

Move = tuple[int, int, int]
"""Target address, source address, number of bytes."""


class HostBuffer:
    """A block of host memory that is reused, and grown when needed."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int, is_pinned: bool) -> Tensor:
        """At least this many bytes, with their pages mapped; the block of an earlier call is overwritten."""
        if len(self._block) < num_bytes or (is_pinned and not self._block.is_pinned()):
            self._block = torch.empty(0, dtype=torch.uint8)  # frees the old one first
            self._block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned).fill_(0)
        return self._block


class CopyJob:
    """Memory copies that any number of threads work on."""

    def __init__(self, moves: list[Move]) -> None:
        self._moves = iter(moves)
        self._num_open = len(moves)
        self._lock = Lock()
        self._done = Event()
        if not moves:
            self._done.set()

    def work(self) -> None:
        """Copy until nothing is left to start."""
        for target, source, num_bytes in self._moves:
            memmove(target, source, num_bytes)  # releases the GIL
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._done.set()

    def finish(self) -> None:
        """Copy what is left, and wait for other threads."""
        self.work()
        self._done.wait()


class Snapshot:
    """The current content of files.

    Tensors in `deferred` (by address) are copied by the first call of `copy_job.finish`, all others at once.
    """

    def __init__(self, files: Collection[TensorFile], buffer: HostBuffer, deferred: Collection[int] = ()) -> None:
        block = buffer.take(num_bytes(files), is_pinned=any(tensor.is_cuda for tensor in _all(files)))
        self.views: list[list[memoryview]] = []
        self._events: list[torch.cuda.Event] = []
        now: list[Move] = []
        later: list[Move] = []
        start = 0
        for file in files:
            for name, offset in file.offsets.items():
                tensor = file.tensors[name].detach()
                target = block[start + offset : start + offset + tensor.nbytes]
                if _is_contiguous_cpu(tensor):
                    moves = later if tensor.data_ptr() in deferred else now
                    moves.extend(_chunks(target.data_ptr(), tensor.data_ptr(), tensor.nbytes))
                else:
                    target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            view = block[start : start + file.num_data_bytes].numpy().data
            self.views.append([memoryview(file.header), view])
            start += _padded(file.num_data_bytes)
        for device in {tensor.device for tensor in _all(files) if tensor.is_cuda}:
            # Later work on the stream waits for these copies anyway; only a reader has to wait.
            self._events.append(torch.cuda.current_stream(device).record_event())
        self.copy_job = CopyJob(later)
        _copy_in_parallel(now)

    def wait(self) -> None:
        """Wait until everything is copied."""
        self.copy_job.finish()
        for event in self._events:
            event.synchronize()


def num_bytes(files: Collection[TensorFile]) -> int:
    """The buffer size of a snapshot."""
    return sum(_padded(file.num_data_bytes) for file in files)


def _all(files: Collection[TensorFile]) -> Iterator[Tensor]:
    return chain.from_iterable(file.tensors.values() for file in files)


def _padded(num: int) -> int:
    return -(-num // _ALIGNMENT) * _ALIGNMENT


def _is_contiguous_cpu(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.device.type != "cpu":
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _chunks(target: int, source: int, num: int) -> Iterator[Move]:
    for start in range(0, num, _CHUNK):
        yield target + start, source + start, min(_CHUNK, num - start)


def _copy_in_parallel(moves: list[Move]) -> None:
    job = CopyJob(moves)
    helpers = [Thread(target=job.work) for _ in range(_COPY_THREADS if len(moves) > 1 else 0)]
    for helper in helpers:
        helper.start()
    job.finish()
    for helper in helpers:
        helper.join()
