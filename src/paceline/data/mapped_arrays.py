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
from pathlib import Path
from typing import IO, Any

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
_FACTS = "facts"

Array = NDArray[Any]


class DamagedFileError(Exception):
    """The file does not hold mapped arrays, or is truncated."""


class MappedArrays:
    """A file of named arrays. They are mapped into memory and may not be written to; it pickles as its file's name.

    Raises DamagedFileError unless the header is sound and every array has its place; `verify` compares the arrays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path, buffering=0) as file:
            header = file.read(_HEADER)
            self._header = header.rstrip(b" ")  # which goes to other processes
            try:
                if int.from_bytes(header[:8], "little") != _HEADER - 8 or len(header) != _HEADER:
                    raise ValueError("is no file of mapped arrays, or truncated")
                described: dict[str, Any] = json.loads(header[8:])
                self._checksums: dict[str, str] = described.pop("__metadata__")
                if self._checksums.pop("header") != _checksum_of(described, self._checksums):
                    raise ValueError("has a damaged header")
                if (
                    _HEADER + max(each["data_offsets"][1] for each in described.values())
                    != os.fstat(file.fileno()).st_size
                ):
                    raise ValueError("another length than its header says")
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._arrays: dict[str, Array] = {
                    name: np.ndarray(each["shape"], _TYPES[each["dtype"]], memory, _HEADER + each["data_offsets"][0])
                    for name, each in described.items()
                }
                self.facts: dict[str, Any] = json.loads(self[_FACTS].tobytes())
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise DamagedFileError(f"{path}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._header)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> Array:
        """An array by name."""
        return self._arrays[name]

    def rows(self, name: str) -> Rows:
        """An array of rows of different lengths."""
        return Rows(self, name)

    def verify(self, skip: Collection[str] = ()) -> None:
        """Compare all arrays but those in `skip` with their checksums; a difference is a DamagedFileError."""
        for name in self._arrays.keys() - skip:
            if str(zlib.crc32(self[name].data)) != self._checksums[name]:
                raise DamagedFileError(f"{self.path}: {name} is not what was written")


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
    """The same file in another process, checksums of all arrays included; it was verified in the first one."""
    try:
        arrays = MappedArrays(path)
    except (OSError, DamagedFileError) as error:
        raise DataError(f"{path}: cannot be opened again ({error})") from error
    if arrays._header != header:
        raise DataError(f"{path}: was replaced while it was in use; start again")
    return arrays


def _checksum_of(described: dict[str, Any], checksums: dict[str, str]) -> str:
    return str(zlib.crc32(json.dumps([described, checksums]).encode()))


class ArrayWriter:
    """Takes named arrays, each in pieces of any length, and writes them into a file.

    Whole numbers are stored in the smallest type that holds them.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, list[Array]] = {}
        self._totals: dict[str, int] = {}
        self.facts: dict[str, Any] = {}
        """What to keep beside the arrays; JSON must be able to hold it."""

    def append(self, name: str, values: Array) -> None:
        """Add rows to an array."""
        self._pieces.setdefault(name, []).append(np.array(values))

    def append_rows(self, name: str, lengths: Sequence[int] | Array, values: Array) -> None:
        """Add rows of different lengths: all their numbers, and how many belong to each."""
        ends = np.cumsum(lengths, dtype=np.int64) + self._totals.get(name, 0)
        self._totals[name] = int(ends[-1]) if len(ends) else self._totals.get(name, 0)
        self.append(name, values)
        self.append(f"{name}.ends", ends)

    def append_texts(self, name: str, texts: Sequence[bytes]) -> None:
        """Add rows of text."""
        self.append_rows(name, [len(text) for text in texts], np.frombuffer(b"".join(texts), np.uint8))

    def write(self, file: IO[bytes], streamed: Streamed | None = None) -> None:
        """Write the whole file, behind the array that was streamed into it if there is one."""
        self.append(_FACTS, np.frombuffer(json.dumps(self.facts).encode(), np.uint8))
        arrays = [(name, _narrow(np.concatenate(pieces))) for name, pieces in self._pieces.items()]
        arrays.sort(key=lambda item: -item[1].itemsize)  # so that every array is aligned to the size of its numbers
        parts = [(streamed.name, "U8", [streamed.size], streamed.size, streamed.checksum)] if streamed else []
        parts += [
            (name, _NAMES[array.dtype], [*array.shape], array.nbytes, zlib.crc32(array.data)) for name, array in arrays
        ]
        described, end = {}, 0
        for name, dtype, shape, num_bytes, _ in parts:
            described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
            end += num_bytes
        checksums = {name: str(checksum) for name, *_, checksum in parts}
        checksums["header"] = _checksum_of(described, checksums)
        header = json.dumps({"__metadata__": checksums, **described}).encode()
        assert len(header) <= _HEADER - 8, "too many arrays for a header of this length"
        file.seek(0)
        file.write((_HEADER - 8).to_bytes(8, "little") + header.ljust(_HEADER - 8))
        file.seek(_HEADER + (streamed.size if streamed else 0))
        for _, array in arrays:
            file.write(array.data)
        file.truncate()
        file.flush()


class Streamed:
    """Writes rows of bytes into a file before its other arrays are known. They are as long as multiples of 8."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name, self._file = name, file
        self.size = self.checksum = 0
        file.seek(_HEADER)

    def append(self, row: bytes) -> None:
        """Add a row."""
        self._file.write(row)
        self.checksum = zlib.crc32(row, self.checksum)
        self.size += len(row)


def _narrow(values: Array) -> Array:
    """The numbers in the smallest type that holds them, little-endian; floats as they are."""
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    fits = (kind for kind in _INTEGERS if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max)
    return np.ascontiguousarray(values, next(fits))
