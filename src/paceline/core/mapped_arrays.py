"""The one memory-mapped format: named arrays in a file, verified when opened, shared by all processes of a machine.

A file holds a magic word; the arrays, each padded to a multiple of 64 bytes; a JSON header with a few facts and the
type, shape, place and checksum of each array; the header's length and checksum; and the magic word again. Everything is
little-endian, nothing is pickled. Indexes and packs are such files.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular

MAGIC = b"PACELINE-ARRAYS1"
TRAILER = struct.Struct("<QI16s")  # length and CRC-32 of the header, and the magic word
ALIGNMENT = 64
_PROLOGUE = MAGIC.ljust(ALIGNMENT, b"\0")
_TYPES = {"|u1", "<u2", "<u4", "<u8", "|i1", "<i2", "<i4", "<i8", "<f4", "<f8"}
_MAX_HEADER = 1 << 28
_CHUNK = 1 << 20
_SPOOLED = 1 << 20  # bytes of an array that are held in memory before they go into a temporary file

Array = NDArray[Any]


class DamagedFileError(Exception):
    """The file does not hold mapped arrays, or is truncated."""


class WriteError(OSError):
    """Arrays cannot be written here: the disk is full, or may not be written to."""


class _Place(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    checksum: int

    @property
    def end(self) -> int:
        return self.start + aligned(math.prod(self.shape) * self.dtype.itemsize)


def aligned(size: int) -> int:
    """The size rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class MappedArrays:
    """A file of named arrays. They are mapped into memory and may not be written to.

    Raises DamagedFileError unless the header is sound and every array has its place; `verify` compares the arrays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path, buffering=0) as file:
            self.owner = os.fstat(file.fileno()).st_uid
            try:
                self._header = _read_header(file)
                content = json.loads(self._header)
                self.facts: dict[str, Any] = content["facts"]
                self._places = {name: _place(of) for name, of in content["arrays"].items()}
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise DamagedFileError(f"{path}: {error}") from error
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        end = len(self._map) - TRAILER.size - len(self._header)
        if max((place.end for place in self._places.values()), default=ALIGNMENT) != end:
            raise DamagedFileError(f"{path}: another length than its header says")

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._header)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> Array:
        """An array by name."""
        dtype, shape, start, _ = self._places[name]
        return np.ndarray(shape, dtype, self._map, start)

    def column(self, name: str) -> Column:
        """An array that is sent to other processes without being copied."""
        return Column(self, name)

    def rows(self, name: str) -> Rows:
        """An array of rows of different lengths."""
        return Rows(self, name)

    def has_header(self, header: bytes) -> bool:
        """Whether the file is the one that had this header, checksums of all arrays included."""
        return self._header == header

    def verify(self, skip: Collection[str] = ()) -> None:
        """Compare all arrays but those in `skip` with their checksums; a difference is a DamagedFileError."""
        with open_regular(self.path, buffering=0) as file:  # read, not mapped: this process shall not keep it in memory
            for name, place in self._places.items():
                checksum = 1
                for start in () if name in skip else range(place.start, place.end, _CHUNK):
                    length = min(_CHUNK, place.end - start)
                    checksum = zlib.adler32(os.pread(file.fileno(), length, start), checksum)
                if name not in skip and checksum != place.checksum:
                    raise DamagedFileError(f"{self.path}: {name} is not what was written")


class Column:
    """An array that pickles as the name of its file."""

    def __init__(self, arrays: MappedArrays, name: str) -> None:
        self.values = arrays[name]
        self._origin = arrays, name

    def __reduce__(self) -> tuple[Any, ...]:
        return Column, self._origin

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> Any:
        return self.values[row]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values.tolist())


class Rows:
    """Rows of different lengths, by number; it pickles as the name of its file."""

    def __init__(self, arrays: MappedArrays, name: str) -> None:
        self.values, self.ends = arrays[name], arrays[f"{name}.ends"]
        self._origin = arrays, name

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, self._origin

    def __len__(self) -> int:
        return len(self.ends)

    def span(self, row: int) -> tuple[int, int]:
        """Where a row begins and ends."""
        return int(self.ends[row - 1]) if row else 0, int(self.ends[row])

    def __getitem__(self, row: int) -> Array:
        start, end = self.span(row)
        return self.values[start:end]

    def texts(self, rows: Iterable[int] | None = None) -> Iterator[bytes]:
        """Rows of text, all of them unless given."""
        return (self[row].tobytes() for row in (range(len(self)) if rows is None else rows))


def _reopen(path: Path, header: bytes) -> MappedArrays:
    """The same file in another process; it was verified in the first one."""
    try:
        arrays = MappedArrays(path)
    except (OSError, DamagedFileError) as error:
        raise DataError(f"{path}: cannot be opened again ({error})") from error
    if not arrays.has_header(header):
        raise DataError(f"{path}: was replaced while it was in use; start again")
    return arrays


def _read_header(file: IO[bytes]) -> bytes:
    if file.read(ALIGNMENT) != _PROLOGUE:
        raise ValueError("has no magic word")
    size = file.seek(0, os.SEEK_END)
    if size < ALIGNMENT + TRAILER.size:
        raise ValueError("is too short")
    file.seek(size - TRAILER.size)
    length, checksum, magic = TRAILER.unpack(file.read(TRAILER.size))
    if magic != MAGIC or length > min(_MAX_HEADER, size - TRAILER.size):
        raise ValueError("is truncated, or damaged at its end")
    file.seek(size - TRAILER.size - length)
    header = file.read(length)
    if zlib.crc32(header) != checksum:
        raise ValueError("has a damaged header")
    return header


def _place(described: Mapping[str, Any]) -> _Place:
    shape, start = tuple(map(int, described["shape"])), int(described["start"])
    if described["type"] not in _TYPES or min(start, *shape) < 0 or not shape:
        raise ValueError("has an array of an unknown kind")
    return _Place(np.dtype(described["type"]), shape, start, int(described["checksum"]))


class ArrayWriter:
    """Writes named arrays into a file, each in pieces of any length, and holds none of them in memory.

    Whole numbers are stored in the smallest type that holds them. The first array of bytes or floats goes straight to
    its place, so that large ones are written once.
    """

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        self._file, self._folder = file, folder
        self._arrays: dict[str, _GrowingArray] = {}
        self._totals: dict[str, int] = {}
        self.facts: dict[str, Any] = {}
        """What to keep beside the arrays; JSON must be able to hold it."""
        with _write_errors():
            file.seek(0)
            file.write(_PROLOGUE)

    def append(self, name: str, values: Array) -> None:
        """Add rows to an array."""
        with _write_errors():
            if name not in self._arrays:
                is_first = not any(array.is_in_place for array in self._arrays.values())
                in_place = self._file if is_first and (values.dtype == np.uint8 or values.dtype.kind == "f") else None
                self._arrays[name] = _GrowingArray(self._folder, values, in_place)
            self._arrays[name].append(values)

    def append_rows(self, name: str, lengths: Sequence[int] | Array, values: Array) -> None:
        """Add rows of different lengths: all their numbers, and how many belong to each."""
        ends = np.cumsum(lengths, dtype=np.int64) + self._totals.get(name, 0)
        self._totals[name] = int(ends[-1]) if len(ends) else self._totals.get(name, 0)
        self.append(name, values)
        self.append(f"{name}.ends", ends)

    def append_texts(self, name: str, texts: Sequence[bytes]) -> None:
        """Add rows of text."""
        self.append_rows(name, [len(text) for text in texts], np.frombuffer(b"".join(texts), np.uint8))

    def finish(self) -> None:
        """Write what is not written yet. The file is whole then."""
        with _write_errors():
            described = {}
            for name, array in sorted(self._arrays.items(), key=lambda item: not item[1].is_in_place):
                start = ALIGNMENT if array.is_in_place else self._file.tell()
                stored, checksum = array.finish(self._file)
                shape = [array.count, *array.row_shape]
                described[name] = {"type": stored.str, "shape": shape, "start": start, "checksum": checksum}
            header = json.dumps({"facts": self.facts, "arrays": described}).encode()
            self._file.write(header + TRAILER.pack(len(header), zlib.crc32(header), MAGIC))
            self._file.truncate()
            self._file.flush()


@contextmanager
def _write_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(error.errno, error.strerror) from error


class _GrowingArray:
    """One array while it is written: in its place, or aside with the range of its numbers."""

    def __init__(self, folder: Path, first: Array, in_place: IO[bytes] | None) -> None:
        self.is_in_place = in_place is not None
        self.row_shape, self.count = first.shape[1:], 0
        self._dtype = first.dtype.newbyteorder("<")
        self._file: Any = in_place or tempfile.SpooledTemporaryFile(_SPOOLED, dir=str(folder))  # noqa: SIM115
        self._least, self._most, self._checksum = 0, 0, 1

    def append(self, values: Array) -> None:
        if not len(values):
            return
        self.count += len(values)
        content = np.ascontiguousarray(values, self._dtype).data
        if self.is_in_place:
            self._checksum = zlib.adler32(content, self._checksum)
        elif values.size:
            self._least, self._most = min(self._least, values.min()), max(self._most, values.max())
        self._file.write(content)

    def finish(self, file: IO[bytes]) -> tuple[np.dtype[Any], int]:
        """Write the array, or what is left of it; its type and checksum in the file."""
        stored = self._stored_type()
        if not self.is_in_place:
            self._file.seek(0)
            while chunk := self._file.read(_CHUNK):
                written = np.frombuffer(chunk, self._dtype).astype(stored, copy=False).tobytes()
                self._checksum = zlib.adler32(written, self._checksum)
                file.write(written)
            self._file.close()
        size = self.count * math.prod(self.row_shape) * stored.itemsize
        padding = bytes(aligned(size) - size)
        file.write(padding)
        return stored, zlib.adler32(padding, self._checksum)

    def _stored_type(self) -> np.dtype[Any]:
        if self._dtype.kind == "f" or self.is_in_place:
            return self._dtype
        kinds = (np.uint8, np.uint16, np.uint32, np.uint64) if self._least >= 0 else (np.int8, np.int16, np.int32)
        fitting = (kind for kind in kinds if np.iinfo(kind).min <= self._least and self._most <= np.iinfo(kind).max)
        return np.dtype(next(fitting, np.int64)).newbyteorder("<")
