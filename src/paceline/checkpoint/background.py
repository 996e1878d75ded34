"""Saving beside training: the training thread waits for a copy in memory, another one for the disk."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from paceline.checkpoint.folder import Folder
from paceline.checkpoint.shards import Part, Share
from paceline.checkpoint.snapshot import HostMemory, Snapshot, num_bytes
from paceline.checkpoint.state import Tree
from paceline.checkpoint.store import Store
from paceline.core.errors import CheckpointError

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
        figures: Mapping[str, float],
        lasting: Iterable[Tensor] = (),
    ) -> None:
        """Copy everything and return; it is written from then on. Waits until an earlier save is finished.

        Tensors in `lasting` are copied after the return: nobody may change them before `release` was called.
        """
        started = time.perf_counter()
        self.release()
        self._join()
        waited = time.perf_counter() - started
        content = self._gather(step, model, state, figures)
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

    def _gather(
        self, step: int, model: Mapping[str, Tensor | Part], state: Tree, figures: Mapping[str, float]
    ) -> Folder:
        attempt = f"{self._share.attempt}.{self._num_begun}"
        return Folder(step, model, state, figures, replace(self._share, attempt=attempt))

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
        self._outcomes.append(replace(outcome, seconds=time.perf_counter() - started))


class NoSaver:
    """In the place of a saver where another process saves everything."""

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
        figures: Mapping[str, float],
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


def _step_back() -> None:
    """Let every other thread compute first; the disk has time."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
