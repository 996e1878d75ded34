"""Asynchronous saves: a snapshot into a reused host buffer, then a low-priority writer thread."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.files import TensorFile
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.shards import SaveRank, TensorShard
from paceline.checkpoint.state import Tree
from paceline.checkpoint.store import Saved, Store
from paceline.core.errors import CheckpointError

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
    ) -> None:
        """Copy everything, then write it in the background. Waits for an earlier save to finish."""
        started = time.perf_counter()
        self._join()
        waited = time.perf_counter() - started
        content = self._gather(step, model, state, metrics)
        snapshot = Snapshot(content.tensors.values(), self._buffer)
        content.pieces |= dict(zip(content.tensors, snapshot.views, strict=True))
        content.tensors.clear()  # frees copies that were made for this save
        result = SaveResult(step, self.store.path_of(step), content.size, waited=waited)
        self._started_step = step
        self._num_started += 1
        blocked = time.perf_counter() - started - waited
        self._run_in_background(lambda: self._write(content, snapshot, replace(result, blocked=blocked)))

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
            _lower_priority()
            snapshot.wait()
            saved = self.store.write(content)
            result = replace(result, is_best=saved.is_best)
        except (CheckpointError, OSError) as error:
            result = replace(result, error=str(error))
        self.has_failed = result.error is not None
        self._results.append(replace(result, seconds=time.perf_counter() - started))


class NoSaver(Saver):
    """The saver of a rank that writes nothing: it knows which step was saved last."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, rank=1, world_size=2)

    def reserve(self, model: Mapping[str, Tensor | TensorShard], state: Tree) -> None:
        """Do nothing."""

    def start(
        self,
        step: int,
        model: Mapping[str, Tensor | TensorShard],
        state: Tree,
        metrics: Mapping[str, float],
    ) -> None:
        """Record the step."""
        self._started_step = step


def _lower_priority() -> None:
    """Give this thread a lower priority than those that train."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


_ALIGNMENT = 64


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


class Snapshot:
    """The current content of files, in a buffer."""

    def __init__(self, files: Collection[TensorFile], buffer: HostBuffer) -> None:
        devices = {tensor.device for tensor in _all(files) if tensor.is_cuda}
        block, start = buffer.take(num_bytes(files), is_pinned=bool(devices)), 0
        self.views: list[list[memoryview]] = []
        for file in files:
            for name, offset in file.offsets.items():
                tensor = file.tensors[name].detach()
                target = block[start + offset : start + offset + tensor.nbytes]
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            view = block[start : start + file.num_data_bytes].numpy().data
            self.views.append([memoryview(file.header), view])
            start += _padded(file.num_data_bytes)
        # Later work on the stream waits for these copies anyway; only a reader has to wait.
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait(self) -> None:
        """Wait until everything is copied from devices."""
        for event in self._events:
            event.synchronize()


def num_bytes(files: Collection[TensorFile]) -> int:
    """The buffer size of a snapshot."""
    return sum(_padded(file.num_data_bytes) for file in files)


def _all(files: Collection[TensorFile]) -> Iterator[Tensor]:
    return chain.from_iterable(file.tensors.values() for file in files)


def _padded(num: int) -> int:
    return -(-num // _ALIGNMENT) * _ALIGNMENT
