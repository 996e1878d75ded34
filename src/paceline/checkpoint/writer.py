"""Asynchronous saves: a snapshot into a reused host buffer, then a low-priority writer thread."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.folder import Folder
from paceline.checkpoint.shards import SaveRank, TensorShard
from paceline.checkpoint.state import Tree
from paceline.checkpoint.store import Saved, Store
from paceline.core.errors import CheckpointError

_NICENESS = 10
_ALIGNMENT = 64


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
    rank that writes shards has a saver; `token` is equal on all of them and new for every start of the run. One of a
    rank that writes nothing only knows which step was saved last.
    """

    def __init__(self, store: Store, rank: int = 0, world_size: int = 1, token: str = "", writes: bool = True) -> None:
        self.store = store
        self._writes = writes
        self._rank = SaveRank(rank, world_size, token)
        self._buffer = torch.empty(0, dtype=torch.uint8)  # reused, and grown when needed
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

    def start(
        self,
        step: int,
        model: Mapping[str, Tensor | TensorShard],
        state: Tree,
        metrics: Mapping[str, float],
    ) -> None:
        """Copy everything, then write it in the background. Waits for an earlier save to finish."""
        if not self._writes:
            self._started_step = step
            return
        started = time.perf_counter()
        self._join()
        waited = time.perf_counter() - started
        attempt = f"{self._rank.attempt}.{self._num_started}"
        content = Folder(step, model, state, metrics, replace(self._rank, attempt=attempt))
        copies = self._copy(content)
        result = SaveResult(step, self.store.path_of(step), content.size, waited=waited)
        self._started_step = step
        self._num_started += 1
        blocked = time.perf_counter() - started - waited
        self._run_in_background(lambda: self._write(content, copies, replace(result, blocked=blocked)))

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
        if not self._writes or self._rank.rank or self.has_failed or self.last_step != step:
            return None
        return self.store.record_metrics(step, metrics)

    def _copy(self, content: Folder) -> list[torch.cuda.Event]:
        """Copy the tensors of the files into the buffer, and have those be written; the events are when it is done."""
        devices = {each.device for file in content.tensors.values() for each in file.tensors.values() if each.is_cuda}
        size = sum(_padded(file.num_data_bytes) for file in content.tensors.values())
        if len(self._buffer) < size or (devices and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old one first
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices))
        start = 0
        for path, file in content.tensors.items():
            for name, offset in file.offsets.items():
                tensor = file.tensors[name].detach()
                target = self._buffer[start + offset : start + offset + tensor.nbytes]
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            data = self._buffer[start : start + file.num_data_bytes].numpy().data
            content.pieces[path] = [memoryview(file.header), data]
            start += _padded(file.num_data_bytes)
        content.tensors.clear()  # frees copies that were made for this save
        # Later work on the stream waits for these copies anyway; only a reader has to wait.
        return [torch.cuda.current_stream(device).record_event() for device in devices]

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

    def _write(self, content: Folder, copies: list[torch.cuda.Event], result: SaveResult) -> None:
        started = time.perf_counter()
        try:
            _lower_priority()
            for copied in copies:
                copied.synchronize()
            saved = self.store.write(content)
            result = replace(result, is_best=saved.is_best)
        except (CheckpointError, OSError) as error:
            result = replace(result, error=str(error))
        self.has_failed = result.error is not None
        self._results.append(replace(result, seconds=time.perf_counter() - started))


def _lower_priority() -> None:
    """Give this thread a lower priority than those that train."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _padded(num: int) -> int:
    return -(-num // _ALIGNMENT) * _ALIGNMENT
