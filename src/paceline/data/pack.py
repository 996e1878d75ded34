"""Packs: all samples of a data set in one file, resized, so that training decodes nothing."""

from __future__ import annotations

import errno
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
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.atomic_write import sync_folder
from paceline.core.errors import DataError
from paceline.core.file_lock import lock_file
from paceline.core.process import num_cores
from paceline.data.batch import Sample
from paceline.data.pack_format import (
    ARRAY_BYTES,
    MAGIC,
    PREAMBLE,
    RECORD_BYTES,
    ArrayField,
    Header,
    Keypoints,
    align,
    checksum,
    number_of,
    records_begin,
    shape_of,
)
from paceline.data.skip_list import UNREADABLE, Skipped, as_skipped
from paceline.data.split_loader import Dataset, TransformPipeline
from paceline.data.transforms.functional import size_of
from paceline.data.transforms.geometric import Resize

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
            return _Writer(dataset, path, file, sizes, max_skipped).write(progress, threads or num_cores())
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or error
        raise DataError(f"{path}: the pack cannot be written ({why}); nothing is left of it") from error


@contextmanager
def _written_aside(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name only when all is written; what a killed process left of one is written over."""
    aside = path.with_name(f".{path.name}.part")
    try:
        descriptor = lock_file(aside, patience=0)
    except BlockingIOError as error:
        raise DataError(f"{path}: another process is writing this pack just now") from error
    with os.fdopen(descriptor, "r+b", buffering=1 << 20) as file:
        try:
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
        self._preparation = TransformPipeline(dataset, [] if size is None else [_Shrink(size)], seed=0)
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
            record = serialize(header, row_type, number, self.file.tell(), sample)
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
            return as_skipped(self.dataset, index, error)

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


Shapes = dict[str, tuple[int, ...]]


class Record(NamedTuple):
    """A sample as it is written."""

    row: bytes
    data: bytes
    shapes: Shapes


def describe(dataset: Dataset, first: Sample, size: int | list[int] | None) -> Header:
    """The header for samples like the first one; what is known only at the end is left at 0."""
    arrays: dict[str, ArrayField] = {}
    numbers = {}
    for name, value in first.items():
        array = np.asarray(value)
        if array.dtype.kind not in "buif":
            raise DataError(f"a pack holds numbers and arrays of them, but {name!r} of the first sample is {value!r}")
        if array.ndim:
            arrays[name] = ArrayField.model_validate({"dtype": array.dtype.name, "dims": array.ndim})
        else:
            numbers[name] = "float64" if array.dtype.kind == "f" else "int64"
    return Header.model_validate(
        {
            "classes": list(dataset.classes),
            "channels": dataset.channels,
            "joints": _joints(dataset),
            "size": size,
            "arrays": dict(sorted(arrays.items(), key=lambda item: (item[0] != "image", item[0]))),
            "numbers": numbers,
            "even": False,
            "room": len(dataset),
            **dict.fromkeys(["samples", "records_end", "left_out_bytes", "left_out_crc"], 0),
        }
    )


def serialize(header: Header, row_type: np.dtype[np.void], number: int, begin: int, sample: Sample) -> Record:
    """Sample `number` as a record that begins at this byte of the file, and its row of the index."""
    _check_fields(header, number, sample)
    row: NDArray[np.void] = np.zeros(1, row_type)
    row["begin"] = begin
    parts: list[bytes] = []
    shapes: Shapes = {}
    end = 0
    for name in header.arrays:
        array = np.asarray(sample[name])
        row[shape_of(name)] = shapes[name] = array.shape
        padding = align(end, ARRAY_BYTES) - end
        parts += [bytes(padding), array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()]
        end += padding + array.nbytes
    for name in header.numbers:
        row[number_of(name)] = sample[name]
    parts.append(bytes(align(end, RECORD_BYTES) - end))
    data = b"".join(parts)
    row["crc"] = checksum(number, row, data)
    return Record(row.tobytes(), data, shapes)


def _check_fields(header: Header, number: int, sample: Sample) -> None:
    if sample.keys() != header.arrays.keys() | header.numbers.keys():
        wanted = ", ".join([*header.arrays, *header.numbers])
        raise DataError(f"sample {number} has the fields {', '.join(sample)}, but the first one {wanted}")
    for name in sample:
        array, field = np.asarray(sample[name]), header.arrays.get(name)
        found = (array.dtype.name, array.ndim)
        if found != ((field.dtype, field.dims) if field else (array.dtype.name, 0)):
            wanted = f"{field.dtype} in {field.dims} dimensions" if field else "one number"
            raise DataError(
                f"{name!r} of sample {number} is {found[0]} in {found[1]} dimensions, but of the first one {wanted}"
            )


def _joints(dataset: Dataset) -> Keypoints | None:
    joints = getattr(dataset, "joints", None)
    if joints is None:
        return None
    return Keypoints(names=list(joints.names), pairs=_pairs(joints.pairs), limbs=_pairs(joints.limbs))


def _pairs(values: Sequence[Any]) -> list[list[int]]:
    return [[int(first), int(second)] for first, second in values]
