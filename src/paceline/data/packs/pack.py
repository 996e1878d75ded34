"""Writing packs: all samples of a data set in one file, resized, so that training reads pixels and decodes nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.disk import sync_folder
from paceline.core.errors import DataError
from paceline.data.batch import Sample
from paceline.data.loading.preparing import Preparation
from paceline.data.loading.source import Dataset
from paceline.data.packs.pack_format import MAGIC, PREAMBLE, Header, records_begin
from paceline.data.packs.pack_records import Shapes, describe, serialise
from paceline.data.skipping import UNREADABLE, Skipped, described
from paceline.data.transforms.geometry import size_of
from paceline.data.transforms.sample_transforms import Resize

PackSize = int | Sequence[int] | None
"""What images are resized to: their shorter side (smaller ones stay), a height and width, or nothing."""
Told = Callable[[int, int], None]
"""Is given how many samples are done, and of how many."""

_ROWS = 4096  # rows of the index that are written at a time
_AHEAD = 4  # samples a thread that may wait for being written


class Written(NamedTuple):
    """A finished pack."""

    path: Path
    samples: int
    bytes: int
    left_out: list[Skipped]


def write_pack(
    dataset: Dataset,
    path: Path,
    size: PackSize,
    progress: Told | None = None,
    max_skipped: int = 0,
    threads: int | None = None,
) -> Written:
    """Write all samples into one file, which is there whole or not at all; the bytes do not depend on `threads`.

    More than `max_skipped` samples that cannot be read are a DataError; fewer are left out and listed in the pack.
    """
    path = Path(path)
    sizes = size if size is None or isinstance(size, int) else list(size)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _written_aside(path) as file:
            return _Writer(dataset, path, file, sizes, max_skipped).write(progress, threads or _cores())
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or error
        raise DataError(f"{path}: the pack cannot be written ({why}); nothing is left of it") from error


@contextmanager
def _written_aside(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name only when all is written; what a killed process left of one is written over."""
    aside = path.with_name(f".{path.name}.part")
    with aside.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{path}: another process is writing this pack just now") from error
        try:
            with aside.open("r+b", buffering=1 << 20) as file:
                file.truncate(0)
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


class _Writer:
    """One pack in the making."""

    def __init__(
        self, dataset: Dataset, path: Path, file: BinaryIO, size: int | list[int] | None, max_skipped: int
    ) -> None:
        self.dataset, self.path, self.file, self.size, self.max_skipped = dataset, path, file, size, max_skipped
        self._preparation = Preparation(dataset, [] if size is None else [_Shrink(size)], seed=0)
        self.left_out: list[Skipped] = []

    def write(self, progress: Told | None, threads: int) -> Written:
        """All samples in their order, then what is known only afterwards."""
        samples = self._readable(progress, threads)
        first = next(samples, None)
        if first is None:
            why = f"; the first one: {self.left_out[0]}" if self.left_out else ""
            raise DataError(f"{self.path}: there is no sample that could be packed{why}")
        header = describe(self.dataset, first, self.size)
        length = len(header.encode())
        header.even, header.samples = self._write_samples(header, length, chain([first], samples))
        header.records_end = self.file.tell()
        left_out = json.dumps([each._asdict() for each in self.left_out]).encode()
        self.file.write(left_out)
        header.left_out_bytes, header.left_out_crc = len(left_out), zlib.crc32(left_out)
        text = header.encode(length)
        self._write_at(0, PREAMBLE.pack(MAGIC, length, zlib.crc32(text)) + text)
        return Written(self.path, header.samples, header.records_end + len(left_out), self.left_out)

    def _write_samples(self, header: Header, length: int, samples: Iterator[Sample]) -> tuple[bool, int]:
        """Whether all have the same shapes, and how many there are."""
        row_type = header.row_type()
        self.file.seek(records_begin(length, header.room, row_type.itemsize))
        rows: list[bytes] = []
        shapes: list[Shapes] = []
        number = -1
        for number, sample in enumerate(samples):
            record = serialise(header, row_type, number, self.file.tell(), sample)
            self.file.write(record.data)
            rows.append(record.row)
            if record.shapes not in shapes and len(shapes) < 2:
                shapes.append(record.shapes)
            if len(rows) == _ROWS:
                self._write_at(PREAMBLE.size + length + (number + 1 - _ROWS) * row_type.itemsize, b"".join(rows))
                rows.clear()
        self._write_at(PREAMBLE.size + length + (number + 1 - len(rows)) * row_type.itemsize, b"".join(rows))
        return len(shapes) == 1, number + 1

    def _write_at(self, place: int, data: bytes) -> None:
        here = self.file.tell()
        self.file.seek(place)
        self.file.write(data)
        self.file.seek(here)

    def _readable(self, progress: Told | None, threads: int) -> Iterator[Sample]:
        for done, each in enumerate(_in_order(self._read, range(len(self.dataset)), threads), 1):
            if isinstance(each, Skipped):
                self._leave_out(each)
            else:
                yield each
            if progress is not None:
                progress(done, len(self.dataset))

    def _read(self, index: int) -> Sample | Skipped:
        try:
            return self._preparation.sample(0, index, np.empty(0))
        except UNREADABLE as error:
            return described(self.dataset, index, error)

    def _leave_out(self, sample: Skipped) -> None:
        self.left_out.append(sample)
        if len(self.left_out) > self.max_skipped:
            raise DataError(
                f"{self.path}: not written, for {len(self.left_out)} samples cannot be read and {self.max_skipped} may"
                f" be left out; the last is {sample}. Repair or remove it, or allow it with data.on_error: skip and"
                " data.max_skipped"
            )


@dataclass(frozen=True)
class _Shrink:
    """Resize to the size of a pack; what is smaller than a shorter side would only grow, and stays as it is."""

    size: int | list[int]
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        is_small = isinstance(self.size, int) and min(size_of(sample)) <= self.size
        return sample if is_small else Resize(self.size)(sample, draws)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _in_order(read: Callable[[int], Sample | Skipped], indices: range, threads: int) -> Iterator[Sample | Skipped]:
    """What `read` gives for each index, computed by threads a little ahead."""
    waiting: deque[Future[Sample | Skipped]] = deque()
    todo = iter(indices)
    with ThreadPoolExecutor(threads, "packing") as pool:
        try:
            waiting.extend(pool.submit(read, index) for index in islice(todo, _AHEAD * threads))
            while waiting:
                ready = waiting.popleft().result()
                waiting.extend(pool.submit(read, index) for index in islice(todo, 1))
                yield ready
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
