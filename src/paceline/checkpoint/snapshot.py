"""Tensors as they are now, in host memory that is used again and again, while they go on changing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from ctypes import memmove
from itertools import chain
from threading import Event, Lock, Thread

import torch
from torch import Tensor

from paceline.checkpoint.files import TensorFile

_CHUNK = 1 << 20
_ALIGNMENT = 64
_HELPERS = min(3, len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else 1)

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
