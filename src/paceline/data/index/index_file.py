"""The file format of an index: named columns of numbers and strings, verified when opened."""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular

MAGIC = b"PACELINE-INDEX-1"
PROLOGUE = struct.Struct("<QI")  # the length of the header and its checksum
_TYPES = {"|u1", "<u2", "<u4", "<u8", "|i1", "<i2", "<i4", "<i8", "<f4", "<f8"}
_MAX_HEADER = 1 << 20
CHUNK = 1 << 20
ALIGNMENT = 64
STRIDE = 64  # rows of different lengths from one noted start to the next

Numbers = NDArray[Any]


class DamagedIndexError(Exception):
    """A file is not an index, or is not whole; it is to be made again."""


def aligned(size: int) -> int:
    """The room that something of this size takes in the file."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Index:
    """An index file, opened. Its columns of numbers are mapped into memory, so all processes share them.

    Raises DamagedIndexError unless every part is as long as it should be and, with `check`, as its checksum says.
    """

    def __init__(self, path: Path, check: bool = True) -> None:
        self.path = path
        self._file = open_regular(path, buffering=0)
        self.is_ours = os.fstat(self._file.fileno()).st_uid == os.getuid()
        """Whether this user wrote it: one of somebody else's could name any file."""
        try:
            self._header, first = _read_header(self._file)
            content = json.loads(self._header)
            self.facts: dict[str, Any] = content["facts"]
            self._places = {name: _place(of, first) for name, of in content["columns"].items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedIndexError(f"{path}: not an index") from error
        ends = [start + count * dtype.itemsize for dtype, count, start, _ in self._places.values()]
        if os.fstat(self._file.fileno()).st_size != max(map(aligned, ends), default=first):
            raise DamagedIndexError(f"{path}: another length than its header says")
        if check:
            self._check()
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._header)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def numbers(self, name: str) -> Numbers:
        """A column of numbers, not to be written to."""
        dtype, count, start, _ = self._places[name]
        return np.frombuffer(self._map, dtype, count, start) if count else np.empty(0, dtype)

    def column(self, name: str) -> Column:
        """The same for those who keep it: it goes to other processes without being copied."""
        return Column(self, name)

    def ragged(self, name: str) -> Ragged:
        """A column of rows of different lengths."""
        return Ragged(self, name)

    def texts(self, name: str) -> list[bytes]:
        """All of a short column of texts."""
        rows = self.ragged(name)
        return [rows[row].tobytes() for row in range(len(rows))]

    def read(self, name: str, start: int, stop: int) -> Numbers:
        """Numbers [start, stop) of a column, read from the file: no process needs memory for the others."""
        dtype, _, first, _ = self._places[name]
        size = dtype.itemsize
        return np.frombuffer(os.pread(self._file.fileno(), (stop - start) * size, first + start * size), dtype)

    def has_header(self, header: bytes) -> bool:
        """Whether the file is the one that had this header, checksums of all columns included."""
        return self._header == header

    def _check(self) -> None:
        for name, (dtype, count, start, expected) in self._places.items():
            checksum, end = 1, start + count * dtype.itemsize
            for at in range(start, end, CHUNK):
                checksum = zlib.adler32(os.pread(self._file.fileno(), min(CHUNK, end - at), at), checksum)
            if checksum != expected:
                raise DamagedIndexError(f"{self.path}: {name} is not what was written")


class Column:
    """A column of numbers by place."""

    def __init__(self, index: Index, name: str) -> None:
        self.values = index.numbers(name)
        self._origin = index, name

    def __reduce__(self) -> tuple[Any, ...]:
        return Column, self._origin

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int) -> Any:
        return self.values[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values.tolist())


class Ragged:
    """Rows of different lengths by number; only where they are is mapped, their numbers are read when asked for."""

    def __init__(self, index: Index, name: str) -> None:
        self._index, self._name = index, name
        self._lengths, self._starts = index.numbers(f"{name}.lengths"), index.numbers(f"{name}.starts")

    def __reduce__(self) -> tuple[Any, ...]:
        return Ragged, (self._index, self._name)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, row: int) -> Numbers:
        length = int(self._lengths[row])
        noted = row // STRIDE
        start = int(self._starts[noted]) + int(self._lengths[noted * STRIDE : row].sum(dtype=np.int64))
        return self._index.read(f"{self._name}.values", start, start + length)

    def texts(self, rows: Iterable[int]) -> Iterator[bytes]:
        """Many rows of a column of texts, one after the other: much faster than to ask for each."""
        values = self._index.numbers(f"{self._name}.values").data
        ends = np.cumsum(self._lengths, dtype=np.int64).tolist()
        for row in rows:
            yield values[ends[row - 1] if row else 0 : ends[row]].tobytes()


def _reopen(path: Path, header: bytes) -> Index:
    """The same index in another process; it was checked in the first one."""
    try:
        index = Index(path, check=False)
    except (OSError, DamagedIndexError) as error:
        raise DataError(f"{path}: the index cannot be opened again ({error})") from error
    if not index.has_header(header):
        raise DataError(f"{path}: the index was made anew while it was in use; start again")
    return index


def _read_header(file: IO[bytes]) -> tuple[bytes, int]:
    """The header and where the columns begin."""
    prologue = file.read(len(MAGIC) + PROLOGUE.size)
    if len(prologue) != len(MAGIC) + PROLOGUE.size or not prologue.startswith(MAGIC):
        raise ValueError("no magic word")
    length, checksum = PROLOGUE.unpack_from(prologue, len(MAGIC))
    header = file.read(length) if length <= _MAX_HEADER else b""
    if len(header) != length or zlib.crc32(header) != checksum:
        raise ValueError("not the header that was written")
    return header, len(prologue) + length


def _place(described: dict[str, Any], first: int) -> tuple[np.dtype[Any], int, int, int]:
    count, start = int(described["count"]), int(described["start"])
    if described["type"] not in _TYPES or count < 0 or start < 0:
        raise ValueError("a column of an unknown kind")
    return np.dtype(described["type"]), count, first + start, int(described["checksum"])


class NoRoomError(Exception):
    """An index cannot be written here; elsewhere perhaps."""


class IndexWriter:
    """Takes columns in pieces of any length and holds none of them in memory; `save` puts them into one file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._columns: dict[str, _GrowingColumn] = {}
        self._rows: dict[str, tuple[int, int]] = {}

    def numbers(self, name: str, values: Numbers) -> None:
        """Append to a column of numbers."""
        if name not in self._columns:
            self._columns[name] = _GrowingColumn(self._folder, values.dtype)
        self._columns[name].append(values)

    def ragged(self, name: str, lengths: Numbers, values: Numbers) -> None:
        """Append rows of different lengths: all their numbers, and how many belong to each."""
        rows, total = self._rows.get(name, (0, 0))
        starts = np.cumsum(lengths, dtype=np.uint64)
        starts = np.concatenate([np.zeros(1, np.uint64), starts]) + np.uint64(total)
        self.numbers(f"{name}.starts", starts[:-1][-rows % STRIDE :: STRIDE])
        self.numbers(f"{name}.lengths", lengths)
        self.numbers(f"{name}.values", values)
        self._rows[name] = rows + len(lengths), int(starts[-1])

    def texts(self, name: str, values: Sequence[bytes]) -> None:
        """Append to a column of texts."""
        lengths = np.fromiter(map(len, values), np.uint32, len(values))
        self.ragged(name, lengths, np.frombuffer(b"".join(values), np.uint8))

    def save(self, file: IO[bytes], facts: dict[str, Any]) -> None:
        """Write everything, with a few `facts` that JSON can hold."""
        start = 0
        described: dict[str, dict[str, Any]] = {}
        for name, column in self._columns.items():
            stored = column.stored_type()
            described[name] = {"type": stored.str, "count": column.count, "start": start, "checksum": 0}
            start += aligned(column.count * stored.itemsize)
        room = len(_header(facts, described)) + len(described) * len(str(1 << 32))  # checksums are not known yet
        first = aligned(len(MAGIC) + PROLOGUE.size + room)
        try:
            file.truncate(first + start)
            for name, column in self._columns.items():
                file.seek(first + described[name]["start"])
                described[name]["checksum"] = column.copy_to(file)
            header = _header(facts, described).ljust(first - len(MAGIC) - PROLOGUE.size)
            file.seek(0)
            file.write(MAGIC + PROLOGUE.pack(len(header), zlib.crc32(header)) + header)
            file.flush()
        except OSError as error:
            raise NoRoomError from error


def _header(facts: dict[str, Any], columns: dict[str, Any]) -> bytes:
    return json.dumps({"facts": facts, "columns": columns}).encode()


class _GrowingColumn:
    """Numbers in a temporary file that has no name, with their range."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed when it is not needed any more
        except OSError as error:
            raise NoRoomError from error
        self.dtype = dtype.newbyteorder("<")
        self.count, self._least, self._most = 0, 0, 0

    def append(self, values: Numbers) -> None:
        if len(values):
            self._least, self._most = min(self._least, values.min()), max(self._most, values.max())
            self.count += len(values)
            try:
                self._file.write(np.ascontiguousarray(values, self.dtype).data)
            except OSError as error:
                raise NoRoomError from error

    def stored_type(self) -> np.dtype[Any]:
        """The smallest type that holds all numbers: what is mapped into memory is small as well."""
        if self.dtype.kind == "f":
            return self.dtype
        kinds = (np.uint8, np.uint16, np.uint32, np.uint64) if self._least >= 0 else (np.int8, np.int16, np.int32)
        fitting = (kind for kind in kinds if np.iinfo(kind).min <= self._least and self._most <= np.iinfo(kind).max)
        return np.dtype(next(fitting, np.int64)).newbyteorder("<")

    def copy_to(self, file: IO[bytes]) -> int:
        """Copy to where the file stands; returns the checksum of what was written."""
        checksum, stored = 1, self.stored_type()
        self._file.seek(0)
        while chunk := self._file.read(CHUNK):
            written = np.frombuffer(chunk, self.dtype).astype(stored, copy=False).tobytes()
            checksum = zlib.adler32(written, checksum)  # all of it is read at every start: faster than others
            file.write(written)
        self._file.close()
        return checksum
