"""Background saving: a snapshot in reused host memory, then a writer thread that does not disturb the step."""

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
from paceline.checkpoint.shards import Part, Share
from paceline.checkpoint.state import Tree
from paceline.checkpoint.store import Saved, Store
from paceline.core.errors import CheckpointError
from paceline.core.process import num_cores

_NICENESS = 10


@dataclass(frozen=True)
class Outcome:
    """How a save ended: committed at `path`, or not, and then `error` says why."""

    step: int
    path: Path
    num_bytes: int
    """What the files take; where saving failed for want of space, this much is needed."""
    is_best: bool = False
    error: str | None = None
    blocked: float = 0.0
    """Seconds for which training stood still while the state was copied."""
    waited: float = 0.0
    """Seconds for which it stood still before, since an earlier save was not finished."""
    seconds: float = 0.0
    """How long writing took, beside training."""


class Saver:
    """Saves one checkpoint at a time through a store, from a thread of its own.

    A save that fails is an outcome, not an exception: the checkpoints before it are as they were, and the next save
    tries again. Of several processes that save parts of one checkpoint each has a saver; `token` is one word that all
    of them know and that an earlier start of the same run did not have.
    """

    def __init__(self, store: Store, rank: int = 0, world: int = 1, token: str = "") -> None:
        self.store = store
        self._share = Share(rank, world, token)
        self._memory = HostMemory()
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._outcomes: deque[Outcome] = deque()
        self._failure: BaseException | None = None
        self._num_begun = 0
        self._begun_step: int | None = None
        self.has_failed = False
        """Whether the save that ended last was not committed."""

    @property
    def last_step(self) -> int | None:
        """The step of the save begun last, whatever becomes of it, else the one that the store found."""
        return self.store.last_step if self._begun_step is None else self._begun_step

    def reserve(self, model: Mapping[str, Tensor | Part], state: Tree) -> None:
        """Have the memory for a save like this one ready when it comes; returns at once."""
        files = self._gather(0, model, state, {}).tensors.values()
        size, is_pinned = num_bytes(files), any(tensor.is_cuda for file in files for tensor in file.tensors.values())
        self._start(lambda: self._memory.take(size, is_pinned))

    def begin(
        self,
        step: int,
        model: Mapping[str, Tensor | Part],
        state: Tree,
        metrics: Mapping[str, float],
        lasting: Iterable[Tensor] = (),
    ) -> None:
        """Copy everything and return; it is written from then on. Waits until an earlier save is finished.

        Tensors in `lasting` are copied after the return: nobody may change them before `release` was called.
        """
        started = time.perf_counter()
        self.release()
        self._join()
        waited = time.perf_counter() - started
        content = self._gather(step, model, state, metrics)
        snapshot = Snapshot(content.tensors.values(), self._memory, {tensor.data_ptr() for tensor in lasting})
        content.pieces |= dict(zip(content.tensors, snapshot.views, strict=True))
        outcome = Outcome(step, self.store.path_of(step), content.size, waited=waited)
        self._snapshot = snapshot
        self._begun_step = step
        self._num_begun += 1
        blocked = time.perf_counter() - started - waited
        self._start(lambda: self._write(content, snapshot, replace(outcome, blocked=blocked)))

    def release(self) -> None:
        """Return when what a save was given as `lasting` may change: copies what is not copied yet."""
        if self._snapshot is not None:
            self._snapshot.copying.finish()
            self._snapshot = None

    def poll(self) -> list[Outcome]:
        """The saves that ended since the last call; never waits."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def finish(self) -> list[Outcome]:
        """Wait until nothing is being saved; then as `poll`."""
        self._join()
        return self.poll()

    def enter(self, step: int, metrics: Mapping[str, float]) -> Saved | None:
        """Enter what the checkpoint of a step reached, if this process commits it and it is there; see `Store`."""
        self._join()
        if self._share.rank or self.has_failed or self.last_step != step:
            return None
        return self.store.enter(step, metrics)

    def _gather(
        self, step: int, model: Mapping[str, Tensor | Part], state: Tree, metrics: Mapping[str, float]
    ) -> Folder:
        attempt = f"{self._share.attempt}.{self._num_begun}"
        return Folder(step, model, state, metrics, replace(self._share, attempt=attempt))

    def _start(self, work: Callable[[], object]) -> None:
        self._join()
        self._thread = threading.Thread(target=self._run, args=(work,), name="paceline saving")
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where it is seen, by `poll`
            self._failure = error

    def _write(self, content: Folder, snapshot: Snapshot, outcome: Outcome) -> None:
        started = time.perf_counter()
        try:
            snapshot.wait()  # with the usual priority: somebody may be about to wait for it
            content.tensors.clear()  # copies made for this save alone need not outlive it
            _step_back()
            saved = self.store.write(content)
            outcome = replace(outcome, is_best=saved.is_best)
        except (CheckpointError, OSError) as error:
            outcome = replace(outcome, error=str(error))
        self.has_failed = outcome.error is not None
        self._outcomes.append(replace(outcome, seconds=time.perf_counter() - started))


class NoSaver:
    """In the place of a saver where another process saves everything."""

    has_failed = False

    def __init__(self, store: Store) -> None:
        self.store = store
        self._begun_step: int | None = None

    @property
    def last_step(self) -> int | None:
        """See `Saver.last_step`; the same in all processes."""
        return self.store.last_step if self._begun_step is None else self._begun_step

    def reserve(self, model: Mapping[str, Tensor | Part], state: Tree) -> None:
        """Nothing is copied here."""

    def begin(
        self,
        step: int,
        model: Mapping[str, Tensor | Part],
        state: Tree,
        metrics: Mapping[str, float],
        lasting: Iterable[Tensor] = (),
    ) -> None:
        """Take note of the step."""
        self._begun_step = step

    def release(self) -> None:
        """Everything may change at any time."""

    def poll(self) -> list[Outcome]:
        """Nothing ever ends here."""
        return []

    def finish(self) -> list[Outcome]:
        """Nothing ever ends here."""
        return []

    def enter(self, step: int, metrics: Mapping[str, float]) -> Saved | None:
        """Nothing was committed here."""
        return None


def _step_back() -> None:
    """Let every other thread compute first; the disk has time."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


_CHUNK = 1 << 20
_ALIGNMENT = 64
_HELPERS = min(3, num_cores() - 1)

Move = tuple[int, int, int]
"""The address to copy to, the address to copy from, and the number of bytes."""


class HostMemory:
    """One block of host memory, kept for the next time and grown when that needs more."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int, is_pinned: bool) -> Tensor:
        """At least this many bytes, with their pages in place; what was taken before is overwritten."""
        if len(self._block) < num_bytes or (is_pinned and not self._block.is_pinned()):
            self._block = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned).fill_(0)
        return self._block


class Copying:
    """Bytes on their way from one place in memory to another, by as many threads as care to work on it."""

    def __init__(self, moves: list[Move]) -> None:
        self._moves = iter(moves)
        self._num_open = len(moves)
        self._lock = Lock()
        self._done = Event()
        if not moves:
            self._done.set()

    def work(self) -> None:
        """Copy until nothing is left to begin with."""
        for target, source, num_bytes in self._moves:
            memmove(target, source, num_bytes)  # other threads run meanwhile
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._done.set()

    def finish(self) -> None:
        """Copy what is left, and wait for what other threads are at."""
        self.work()
        self._done.wait()


class Snapshot:
    """The bytes of files as they are now.

    What is in `lasting` (by address) is copied by whoever calls `copying.finish` first, everything else on the spot.
    """

    def __init__(self, files: Collection[TensorFile], memory: HostMemory, lasting: Collection[int] = ()) -> None:
        block = memory.take(num_bytes(files), is_pinned=any(tensor.is_cuda for tensor in _all(files)))
        self.views: list[list[memoryview]] = []
        self._events: list[torch.cuda.Event] = []
        now: list[Move] = []
        later: list[Move] = []
        start = 0
        for file in files:
            for name, offset in file.offsets.items():
                tensor = file.tensors[name].detach()
                target = block[start + offset : start + offset + tensor.nbytes]
                if _is_plain(tensor):
                    moves = later if tensor.data_ptr() in lasting else now
                    moves.extend(_cut(target.data_ptr(), tensor.data_ptr(), tensor.nbytes))
                else:
                    target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            view = block[start : start + file.num_data_bytes].numpy().data
            self.views.append([memoryview(file.header), view])
            start += _padded(file.num_data_bytes)
        for device in {tensor.device for tensor in _all(files) if tensor.is_cuda}:
            # Later work on the stream waits for these copies by itself, so only a reader has to.
            self._events.append(torch.cuda.current_stream(device).record_event())
        self.copying = Copying(later)
        _copy_together(now)

    def wait(self) -> None:
        """Return when all bytes are there."""
        self.copying.finish()
        for event in self._events:
            event.synchronize()


def num_bytes(files: Collection[TensorFile]) -> int:
    """How much memory a snapshot of these needs."""
    return sum(_padded(file.num_data_bytes) for file in files)


def _all(files: Collection[TensorFile]) -> Iterator[Tensor]:
    return chain.from_iterable(file.tensors.values() for file in files)


def _padded(num: int) -> int:
    return -(-num // _ALIGNMENT) * _ALIGNMENT


def _is_plain(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.device.type != "cpu":
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _cut(target: int, source: int, num: int) -> Iterator[Move]:
    for start in range(0, num, _CHUNK):
        yield target + start, source + start, min(_CHUNK, num - start)


def _copy_together(moves: list[Move]) -> None:
    copying = Copying(moves)
    helpers = [Thread(target=copying.work) for _ in range(_HELPERS if len(moves) > 1 else 0)]
    for helper in helpers:
        helper.start()
    copying.finish()
    for helper in helpers:
        helper.join()
