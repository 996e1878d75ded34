"""Results tables: rows are updated in place by key; everything else in the file stays."""

from __future__ import annotations

import csv
import io
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from paceline.core.atomic_write import sync_folder
from paceline.core.errors import DataError, UsageError, in_one_line
from paceline.core.file_lock import is_at, lock_file
from paceline.core.text import as_cell, from_cell

SUFFIXES = (".csv", ".xlsx")
MAX_BYTES = 1 << 25
"""The largest file that is read as a results table."""
_ATTEMPTS = 3
_PATIENCE_SECONDS = 60.0  # others need a fraction of a second; who was stopped while it wrote is not waited for

Value = str | int | float | None
"""A cell; None for a metric that is not finite."""


class Table(Protocol):
    """Cells by row and column, both from 0; the first row is the header."""

    num_rows: int
    """The number of rows up to the last that is not empty."""
    num_columns: int
    is_changed: bool

    def text(self, row: int, column: int) -> str:
        """A cell as it reads; empty where there is none."""
        ...

    def write(self, row: int, column: int, value: Value) -> None:
        """Change a cell."""
        ...

    def dump(self) -> bytes:
        """The whole file."""
        ...


def check_suffix(path: Path) -> None:
    """Raise UsageError for other extensions than .csv and .xlsx."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: expected a file with the extension {' or '.join(SUFFIXES)}")


def update_rows(
    path: Path, key: Sequence[str], rows: Sequence[Mapping[str, Value]], further: Sequence[str] = ()
) -> None:
    """Update the rows of a .csv or .xlsx file whose `key` columns match; append new ones.

    `further` columns must match too; a table without them counts as having them empty. All other rows, columns and
    cells stay unchanged, and new columns are appended. The file is replaced atomically, by one process at a time. A
    file that is damaged, read-only, open in a spreadsheet program or not a results table raises DataError and stays
    unchanged.
    """
    check_suffix(path)
    with locked(path) as file:
        for _ in range(_ATTEMPTS):
            table = _open(path, file.read(MAX_BYTES), key)
            _put(table, (*key, *further), rows)
            if not table.is_changed or file.replace(table.dump()):
                return
    raise DataError(f"{path}: kept changing while it was written; it is unchanged")


def _open(path: Path, content: bytes | None, key: Sequence[str]) -> Table:
    if path.suffix.lower() == ".csv":
        return CsvTable(path, content, key)
    from paceline.loggers.xlsx_table import XlsxTable  # takes a third of a second, which only such files need

    return XlsxTable(path, content, key)


def _put(table: Table, key: Sequence[str], rows: Sequence[Mapping[str, Value]]) -> None:
    columns: dict[str, int] = {}
    for column in range(table.num_columns):
        columns.setdefault(table.text(0, column), column)  # of two with one name the first is ours
    for name in rows[0] if rows else ():
        _add_column(table, columns, name)
    places: dict[tuple[str, ...], int] = {}
    for row in range(1, table.num_rows):
        places.setdefault(tuple(table.text(row, columns[name]) for name in key), row)
    for values in rows:
        row = places.setdefault(tuple(in_one_line(str(values[name])) for name in key), max(1, table.num_rows))
        for name, value in values.items():
            _add_column(table, columns, name)
            table.write(row, columns[name], value)


def _add_column(table: Table, columns: dict[str, int], name: str) -> None:
    if name not in columns:
        columns[name] = table.num_columns
        table.write(0, columns[name], name)


_DELIMITERS = (",", ";", "\t")
_MARK = "\ufeff"


class CsvTable:
    """The cells of a CSV file; numbers are written without loss."""

    def __init__(self, path: Path, content: bytes | None, key: Sequence[str]) -> None:
        text = _decoded(path, content or b"")
        self._mark = _MARK if text.startswith(_MARK) else ""
        text = text.removeprefix(_MARK)
        self._line_end = "\r\n" if text.partition("\n")[0].endswith("\r") else "\n"
        self._delimiter, self._rows = _parsed(path, text, key)
        filled = [number for number, row in enumerate(self._rows) if any(row)]
        self.num_rows = filled[-1] + 1 if filled else 0
        self.num_columns = max(map(len, self._rows), default=0)
        self.is_changed = False

    def text(self, row: int, column: int) -> str:
        """A cell as it reads."""
        return from_cell(self._written(row, column))

    def write(self, row: int, column: int, value: str | int | float | None) -> None:
        """Change a cell, creating it if needed."""
        text = _text_of(value)
        if self._written(row, column) == text:
            return
        self._rows += [[] for _ in range(row + 1 - len(self._rows))]
        cells = self._rows[row]
        cells += [""] * (column + 1 - len(cells))
        cells[column] = text
        self.num_rows, self.num_columns = max(self.num_rows, row + 1), max(self.num_columns, column + 1)
        self.is_changed = True

    def dump(self) -> bytes:
        """The whole file, each row as wide as the first."""
        width = len(self._rows[0])
        rows = [[*row, *[""] * (width - len(row))] if row else row for row in self._rows]
        lines = [self._delimiter.join(map(self._quoted, row)) + self._line_end for row in rows]
        return (self._mark + "".join(lines)).encode(errors="backslashreplace")

    def _written(self, row: int, column: int) -> str:
        cells = self._rows[row] if row < len(self._rows) else []
        return cells[column] if column < len(cells) else ""

    def _quoted(self, cell: str) -> str:
        # The standard writer leaves a carriage return bare where lines end without one, and so cuts the row in two.
        needs_it = any(character in cell for character in (self._delimiter, '"', "\r", "\n"))
        return '"' + cell.replace('"', '""') + '"' if needs_it else cell


def _decoded(path: Path, content: bytes) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (byte {error.start:,}); it is unchanged") from error
    if "\0" in text:
        raise DataError(f"{path}: holds bytes that are not text; it is damaged or not a CSV file, and is unchanged")
    return text


def _parsed(path: Path, text: str, key: Sequence[str]) -> tuple[str, list[list[str]]]:
    """The delimiter under which the first row has the key columns, and all rows."""
    if not text.strip():
        return _DELIMITERS[0], []
    try:
        for delimiter in _DELIMITERS:
            header = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
            if set(key) <= set(header):
                return delimiter, list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read as CSV ({error}); it is unchanged") from error
    found = in_one_line(text.partition("\n")[0][:60])
    raise DataError(
        f'{path}: is not a results table: its first line, "{found}", lacks the columns {" and ".join(key)};'
        " it is unchanged"
    )


def _text_of(value: str | int | float | None) -> str:
    if isinstance(value, str):
        return as_cell(in_one_line(value))
    return "nan" if value is None or not math.isfinite(value) else repr(value)


@contextmanager
def locked(path: Path) -> Iterator[LockedFile]:
    """Lock a file against other writers of this module, or raise DataError.

    The lock is on the temporary file, so nothing is left behind; the rest of a killed process is overwritten.
    """
    place = Path(os.path.realpath(path))  # a link stays one: what it leads to is replaced
    _refuse_opened(path, place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = place.with_name(f".{place.name}.partial")
        descriptor = _lock(path, aside)
        try:
            yield LockedFile(path, place, aside, descriptor)
        finally:
            if is_at(descriptor, aside):
                aside.unlink()
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error


class LockedFile:
    """A locked file; only programs that ignore the lock can change it."""

    def __init__(self, path: Path, place: Path, aside: Path, descriptor: int) -> None:
        self.path = path
        self._place, self._aside, self._descriptor = place, aside, descriptor
        self._found: os.stat_result | None = None

    def read(self, most: int) -> bytes | None:
        """The content, limited to so many bytes; None if there is no such file."""
        self._found = None
        try:
            # Without blocking, or a pipe would be waited for until somebody writes into it.
            descriptor = os.open(self._place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            self._found = os.fstat(descriptor)
            if not stat.S_ISREG(self._found.st_mode):
                raise DataError(f"{self.path}: is not a file; expected a results table")
            if not self._found.st_mode & 0o222 or not os.access(self._place, os.W_OK):
                raise DataError(f"{self.path}: is read-only; it is unchanged")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(most + 1)
        finally:
            os.close(descriptor)
        if len(content) > most:
            raise DataError(f"{self.path}: has more than {most:,} bytes, too many for a results table")
        return content

    def replace(self, content: bytes) -> bool:
        """Replace the file by `content`; return False and do nothing if it changed since it was read.

        A kill or a full disk leaves the file unchanged.
        """
        os.ftruncate(self._descriptor, 0)
        left = memoryview(content)
        while left:
            left = left[os.pwrite(self._descriptor, left, len(content) - len(left)) :]
        if self._found is not None:
            os.fchmod(self._descriptor, stat.S_IMODE(self._found.st_mode))
        os.fsync(self._descriptor)
        if not self._is_as_found():
            return False
        self._aside.replace(self._place)
        sync_folder(self._place.parent)
        return True

    def _is_as_found(self) -> bool:
        try:
            now = self._place.stat()
        except FileNotFoundError:
            return self._found is None
        then = self._found
        return then is not None and os.path.samestat(now, then) and now.st_mtime_ns == then.st_mtime_ns


def _lock(path: Path, aside: Path) -> int:
    try:
        return lock_file(aside, _PATIENCE_SECONDS)
    except BlockingIOError as error:
        reason = f"another process has been writing it for more than {_PATIENCE_SECONDS:.0f} seconds"
        raise DataError(f"{path}: {reason}") from error


def _refuse_opened(path: Path, place: Path) -> None:
    """Raise DataError if a spreadsheet program has the file open: saving there would undo our rows."""
    for name in (f"~${place.name}", f".~lock.{place.name}#"):
        if os.path.lexists(place.with_name(name)):
            raise DataError(
                f"{path}: is open in another program ({place.with_name(name)} exists); close it there, or remove"
                " that file if it was left behind"
            )
