"""Writes index files a piece at a time, so that an index of any length is made in little memory."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from paceline.data.indexes.index_file import CHUNK, MAGIC, PROLOGUE, STRIDE, Numbers, aligned


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
