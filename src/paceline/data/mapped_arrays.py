"""Named arrays in a file that is mapped into memory: shared by all processes of a machine, and verified.

A file is a stream of bytes, which may be empty, then arrays in the format of safetensors, then their place and their
checksum. Facts beside the arrays are JSON, as one more array. Indexes are such files without a stream, packs with one.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from paceline.core.errors import DamagedFileError, DataError
from paceline.core.regular_file import open_regular

_TYPES = {
    "U8": "|u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
    "I8": "|i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F32": "<f4", "F64": "<f8", "BOOL": "|b1",
}  # fmt: skip
_INTEGERS = [np.dtype(_TYPES[name]) for name in ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")]
_LENGTH = 8  # bytes that tell how long the header of safetensors is
_END = struct.Struct("<QQ8s")  # where the arrays begin, their checksum, and what the file is
_NAME = b"arrays 2"
_FACTS = "facts"
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What `views` raises of bytes that were not encoded by safetensors, whatever their checksum."""

Array = NDArray[Any]


def views(encoded: Array) -> dict[str, Array]:
    """The arrays that were encoded by safetensors, by name; they are the memory itself."""
    start = _LENGTH + int.from_bytes(encoded[:_LENGTH].tobytes(), "little")
    return {
        name: np.ndarray(each["shape"], _TYPES[each["dtype"]], encoded.data, start + each["data_offsets"][0])
        for name, each in json.loads(encoded[_LENGTH:start].tobytes()).items()
    }


class MappedArrays:
    """A file of named arrays. They are mapped into memory and may not be written to; it pickles as its file's name.

    Raises DamagedFileError unless the arrays are what was written; the stream before them is not looked at.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path, buffering=0) as file:
            length = os.fstat(file.fileno()).st_size
            if length < _END.size:
                raise DamagedFileError(f"{path}: is no file of mapped arrays, or truncated")
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        self._end = memory[-_END.size :].tobytes()
        start, checksum, name = _END.unpack(self._end)
        if name != _NAME or start > length - _END.size:
            raise DamagedFileError(f"{path}: is no file of mapped arrays, or truncated")
        encoded = memory[start : -_END.size]
        if zlib.crc32(encoded.data, start) != checksum:
            raise DamagedFileError(f"{path}: is not what was written")
        self.stream = memory[:start]
        try:
            self._arrays = views(encoded)
            self.facts: dict[str, Any] = json.loads(self[_FACTS].tobytes())
        except MALFORMED as error:
            raise DamagedFileError(f"{path}: holds no arrays ({error})") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._end)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> Array:
        """An array by name."""
        return self._arrays[name]

    def rows(self, name: str) -> Rows:
        """An array of rows of different lengths."""
        return Rows(self, name)


class Rows:
    """Rows of different lengths, by number; it pickles as the name of its file."""

    def __init__(self, arrays: MappedArrays, name: str) -> None:
        self.values, self.ends = arrays[name], arrays[f"{name}.ends"]
        self._origin = arrays, name

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, self._origin

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> Array:
        return self.values[int(self.ends[row - 1]) if row else 0 : int(self.ends[row])]

    def texts(self, rows: Iterable[int] | None = None) -> Iterator[bytes]:
        """Rows of text, all of them unless given."""
        return (self[row].tobytes() for row in (range(len(self)) if rows is None else rows))


def _reopen(path: Path, end: bytes) -> MappedArrays:
    """The same file in another process."""
    try:
        arrays = MappedArrays(path)
    except (OSError, DamagedFileError) as error:
        raise DataError(f"{path}: cannot be opened again ({error})") from error
    if arrays._end != end:
        raise DataError(f"{path}: was replaced while it was in use; start again")
    return arrays


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

    def write(self, file: IO[bytes]) -> None:
        """Write the arrays, and end the file there; what was streamed into it before is a multiple of 8 bytes long."""
        self.append(_FACTS, np.frombuffer(json.dumps(self.facts).encode(), np.uint8))
        encoded = save({name: _narrow(np.concatenate(pieces)) for name, pieces in self._pieces.items()})
        start = file.tell()
        file.write(encoded)
        file.write(_END.pack(start, zlib.crc32(encoded, start), _NAME))
        file.truncate()
        file.flush()


def _narrow(values: Array) -> Array:
    """The numbers in the smallest type that holds them, little-endian; floats as they are."""
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    fits = (kind for kind in _INTEGERS if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max)
    return np.ascontiguousarray(values, next(fits))
