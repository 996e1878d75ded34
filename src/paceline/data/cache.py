"""Decoded samples cached in memory, once for all processes of a machine."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np
import torch

from paceline.core.errors import DataError
from paceline.core.mapped_arrays import aligned
from paceline.core.process import free_memory
from paceline.core.records import read_record, record_pieces
from paceline.core.world import World
from paceline.data.batch import Sample, as_arrays
from paceline.data.skip_list import UNREADABLE, locate_error
from paceline.data.split_loader import Dataset

_HEADER = 64  # bytes; two numbers of eight: the bytes in use, and those that the system has given
_CHUNK = 1 << 26  # bytes that are asked of the system at a time


class Cached:
    """A data set whose samples are decoded once. Without room for them, it reads them every time.

    It has no `open`, room or not: images are decoded whole, so that pixels do not depend on a machine's memory.
    """

    def __init__(self, dataset: Dataset, descriptor: int | None, capacity: int) -> None:
        self._dataset = dataset
        self._descriptor = descriptor
        self._capacity = capacity
        self._process = os.getpid()
        self._lock = Lock()
        if descriptor is not None:
            self._memory = memoryview(mmap.mmap(descriptor, capacity))
            self._state = np.frombuffer(self._memory, np.int64, 2)
            self._table = np.frombuffer(self._memory, np.int64, len(dataset), _HEADER)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("open", "gather", "draws") or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def read(self, index: int) -> Sample:
        """Sample `index`; its arrays must not be written to."""
        if self._descriptor is None:
            return self._dataset.read(index)
        if start := int(self._table[index]):
            return read_record(self._memory, start)
        sample = self._dataset.read(index)
        try:
            sample = as_arrays(sample)
        except DataError as error:
            raise locate_error(self._dataset, index, error) from error
        self._keep(index, record_pieces(sample))
        return sample

    @property
    def num_kept(self) -> int:
        """How many samples are in memory now."""
        return 0 if self._descriptor is None else int(np.count_nonzero(self._table))

    def _keep(self, index: int, parts: list[memoryview]) -> None:
        length = sum(map(len, parts))
        with self._own_lock():
            start = self._reserve(length)
        if start is None:
            return
        end = start
        for part in parts:
            self._memory[end : end + len(part)] = part
            end += len(part)
        with self._own_lock():  # whoever finds the place must find what lies there: a lock is a barrier
            self._table[index] = start  # if others have kept the same sample meanwhile, either copy will do

    def _own_lock(self) -> Lock:
        """What keeps threads of a process apart; a process that was forked off must not wait for those it left."""
        if self._process != os.getpid():
            self._lock = Lock()
            self._process = os.getpid()
        return self._lock

    def _reserve(self, length: int) -> int | None:
        """Where `length` bytes may be written; None if there are no more."""
        assert self._descriptor is not None
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            start, given = self._state.tolist()
            if start + length > len(self._memory):
                return None
            if start + length > given:  # else the system would end the process when it finds no memory for a page
                wanted = min(len(self._memory), start + length + _CHUNK)
                os.posix_fallocate(self._descriptor, given, wanted - given)
                self._state[1] = wanted
            self._state[0] = start + length
        except OSError:
            return None
        else:
            return int(start)
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._dataset, os.getpid(), self._descriptor, self._capacity)


def _reopened(dataset: Dataset, process: int, descriptor: int | None, capacity: int) -> Cached:
    """The same memory in a process that was started afresh by the one that holds it."""
    own = None if descriptor is None else os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    return Cached(dataset, own, capacity)


def prepare(descriptor: int, num_samples: int, capacity: int) -> None:
    """Make an empty file one that samples can be kept in."""
    os.ftruncate(descriptor, capacity)
    first = reserved_bytes(num_samples)
    os.posix_fallocate(descriptor, 0, first)
    os.pwrite(descriptor, np.array([first, first], np.int64).tobytes(), 0)


def reserved_bytes(num_samples: int) -> int:
    """What the table of so many samples takes."""
    return aligned(_HEADER + 8 * num_samples)


def bytes_of(sample: Sample) -> int:
    """About what a decoded sample takes."""
    return sum(map(len, record_pieces(sample)))


SHARE = 0.5
"""How much of the free memory decoded samples may take."""

_SHARED_MEMORY = Path("/dev/shm")
_LOOKED_AT = 64  # samples by which the size of all is estimated
_MARGIN = 1.1


def keep_in_memory(dataset: Dataset, world: World, log: Callable[[str], None], promised: int = 0) -> Cached:
    """The data set with its decoded samples kept in memory, which the processes of a machine share.

    If they would not fit into `SHARE` of what is free, but for the bytes that are `promised` elsewhere, that is logged,
    and samples are decoded every time. All processes call this together.
    """
    made, capacity = _make_room(dataset, log, promised) if world.local_rank == 0 else (None, 0)
    message = torch.tensor([capacity, os.getpid(), made.fileno() if made else -1])
    capacity, process, number = world.gather(message)[world.rank - world.local_rank].tolist()
    # The file has no name that a killed process could leave behind.
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC) if capacity else None
    world.barrier()
    if made:
        made.close()
    return Cached(dataset, descriptor, capacity)


def _make_room(dataset: Dataset, log: Callable[[str], None], promised: int) -> tuple[IO[bytes] | None, int]:
    """An empty file for all samples, and its length; none and 0 if there is too little memory."""
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    needed, free = estimated_bytes(dataset), free_bytes(folder) - promised
    if needed > SHARE * free:
        found = f"about {_gigabytes(needed)} are needed, and {_gigabytes(SHARE * free)} is half of what is free"
        log(f"data.cache: samples are not kept in memory: {found}; they are decoded every time")
        return None, 0
    room: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed when all have it open
    try:
        prepare(room.fileno(), len(dataset), needed)
    except OSError as error:
        room.close()
        log(f"data.cache: samples are not kept in memory: {folder} has no room ({error.strerror})")
        return None, 0
    return room, needed


def estimated_bytes(dataset: Dataset) -> int:
    """About what all samples take when they are decoded, by some that are spread over the data set."""
    size = len(dataset)
    looked_at = np.unique(np.linspace(0, size - 1, min(size, _LOOKED_AT)).astype(int)).tolist()
    found = [each for index in looked_at if (each := _bytes_at(dataset, index)) is not None]
    mean = sum(found) / len(found) if found else 0
    return int(mean * size * _MARGIN) + reserved_bytes(size)


def free_bytes(folder: Path) -> int:
    """What may still be taken: of the machine's memory, of this group of processes, and of the file system."""
    space = os.statvfs(folder)
    return min(space.f_bavail * space.f_frsize, free_memory())


def _bytes_at(dataset: Dataset, index: int) -> int | None:
    try:
        sample: Sample = as_arrays(getattr(dataset, "open", dataset.read)(index))
        image = sample["image"]
        if isinstance(image, np.ndarray):
            return bytes_of(sample)
        if hasattr(image, "height"):
            return bytes_of({**sample, "image": None}) + 3 * int(image.height) * int(image.width)
        return bytes_of(dataset.read(index))
    except UNREADABLE:
        return None


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f} GB"
