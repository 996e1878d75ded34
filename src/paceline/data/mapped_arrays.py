"""Named arrays in a safetensors file that is mapped into memory: shared by all processes of a machine, and verified.

The header has a fixed length, so that one array can be written before the others are known, and holds a checksum of
itself and of each array. Facts beside the arrays are JSON, as one more array. Indexes and packs are such files.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular

_TYPES = {
    "U8": "|u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
    "I8": "|i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}
_INTEGERS = [np.dtype(_TYPES[name]) for name in ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")]
_HEADER = 1 << 16  # bytes, its length of 8 bytes included
_CHUNK = 1 << 20
_FACTS = "facts"

Array = NDArray[Any]


class DamagedFileError(Exception):
    """The file does not hold mapped arrays, or is truncated."""


class WriteError(OSError):
    """Arrays cannot be written here: the disk is full, or may not be written to."""


class _Place(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int
    checksum: int


class MappedArrays:
    """A file of named arrays. They are mapped into memory and may not be written to.

    Raises DamagedFileError unless the header is sound and every array has its place; `verify` compares the arrays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path, buffering=0) as file:
            self.owner = os.fstat(file.fileno()).st_uid
            header = file.read(_HEADER)
            self._header = header.rstrip(b" ")  # which goes to other processes
            try:
                self._places = _places(header, os.fstat(file.fileno()).st_size)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self.facts: dict[str, Any] = json.loads(self[_FACTS].tobytes())
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise DamagedFileError(f"{path}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._header)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> Array:
        """An array by name."""
        place = self._places[name]
        return np.ndarray(place.shape, place.dtype, self._map, place.start)

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
                checksum = 0
                for start in () if name in skip else range(place.start, place.end, _CHUNK):
                    checksum = zlib.crc32(os.pread(file.fileno(), min(_CHUNK, place.end - start), start), checksum)
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


def _places(header: bytes, size: int) -> dict[str, _Place]:
    """Where each array is in a file of this size; ValueError unless header and size are what was written."""
    if int.from_bytes(header[:8], "little") != _HEADER - 8 or len(header) != _HEADER:
        raise ValueError("is no file of mapped arrays, or truncated")
    described: dict[str, Any] = json.loads(header[8:])
    checksums = described.pop("__metadata__")
    if checksums.pop("header") != _checksum_of(described, checksums):
        raise ValueError("has a damaged header")
    places = {}
    for name, each in described.items():
        start, end = (_HEADER + offset for offset in each["data_offsets"])
        places[name] = _Place(np.dtype(_TYPES[each["dtype"]]), tuple(each["shape"]), start, end, int(checksums[name]))
    if max(place.end for place in places.values()) != size:
        raise ValueError("another length than its header says")
    return places


def _checksum_of(described: dict[str, Any], checksums: dict[str, str]) -> str:
    return str(zlib.crc32(json.dumps([described, checksums]).encode()))


class ArrayWriter:
    """Writes named arrays into a file, each in pieces of any length.

    Whole numbers are stored in the smallest type that holds them. Arrays wait in memory until all are known, but for
    the bytes of the one that is called `streamed`, whose rows must have a multiple of 8 of them.
    """

    def __init__(self, file: IO[bytes], streamed: str = "") -> None:
        self._file, self._streamed = file, streamed
        self._pieces: dict[str, list[Array]] = {}
        self._totals: dict[str, int] = {}
        self._num_streamed = self._checksum = 0
        self.facts: dict[str, Any] = {}
        """What to keep beside the arrays; JSON must be able to hold it."""
        with _write_errors():
            file.seek(0)
            file.write(bytes(_HEADER))

    def append(self, name: str, values: Array) -> None:
        """Add rows to an array."""
        if name != self._streamed:
            self._pieces.setdefault(name, []).append(np.array(values))
            return
        with _write_errors():
            self._file.write(values.data)
        self._checksum = zlib.crc32(values.data, self._checksum)
        self._num_streamed += len(values)

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
        self.append(_FACTS, np.frombuffer(json.dumps(self.facts).encode(), np.uint8))
        arrays = {name: _narrow(np.concatenate(pieces)) for name, pieces in self._pieces.items()}
        described: dict[str, Any] = {}
        checksums: dict[str, str] = {}
        end = 0

        def describe(name: str, dtype: str, shape: list[int], num_bytes: int, checksum: int) -> None:
            nonlocal end
            described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
            checksums[name] = str(checksum)
            end += num_bytes

        if self._streamed:
            describe(self._streamed, "U8", [self._num_streamed], self._num_streamed, self._checksum)
        with _write_errors():
            # Wide types first, so that every array is aligned to the size of its numbers.
            for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):
                describe(name, _NAMES[array.dtype], list(array.shape), array.nbytes, zlib.crc32(array.data))
                self._file.write(array.data)
            self._file.truncate()
            checksums["header"] = _checksum_of(described, checksums)
            header = json.dumps({"__metadata__": checksums, **described}).encode()
            assert len(header) <= _HEADER - 8, "too many arrays for a header of this length"
            self._file.seek(0)
            self._file.write((_HEADER - 8).to_bytes(8, "little") + header.ljust(_HEADER - 8))
            self._file.seek(0, os.SEEK_END)
            self._file.flush()


@contextmanager
def _write_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(error.errno, error.strerror) from error


def _narrow(values: Array) -> Array:
    """The numbers in the smallest type that holds them, little-endian; floats as they are."""
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    fits = (kind for kind in _INTEGERS if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max)
    return np.ascontiguousarray(values, next(fits))
