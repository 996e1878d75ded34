"""Results tables: rows are updated in place by key; everything else in the file stays."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.atomic_write import sync_folder, write_all
from paceline.core.errors import DataError, UsageError, in_one_line
from paceline.core.file_lock import is_at, lock_file
from paceline.core.regular_file import open_regular
from paceline.core.text import as_cell, from_cell

if TYPE_CHECKING:
    from paceline.loggers.xlsx_table import XlsxTable

SUFFIXES = (".csv", ".xlsx")
MAX_BYTES = 1 << 25
"""The largest file that is read as a results table."""
_PATIENCE_SECONDS = 60.0  # others need a fraction of a second; who was stopped while it wrote is not waited for

Value = str | int | float | None
"""A cell; None for a metric that is not finite."""


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
    place = Path(os.path.realpath(path))  # a link stays one: what it leads to is replaced
    for name in (f"~${place.name}", f".~lock.{place.name}#"):  # of Excel and LibreOffice; saving there would undo ours
        if os.path.lexists(place.with_name(name)):
            raise DataError(
                f"{path}: is open in another program ({place.with_name(name)} exists); close it there, or remove"
                " that file if it was left behind"
            )
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _partial_file(path, place) as (partial, descriptor):
            content = _content(path, place)
            table = _open(path, content, key)
            _put(table, (*key, *further), rows)
            if table.is_changed:
                os.ftruncate(descriptor, 0)
                write_all(descriptor, table.dump())
                if content is not None:
                    os.fchmod(descriptor, place.stat().st_mode & 0o777)
                os.fsync(descriptor)
                partial.replace(place)
                sync_folder(place.parent)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _partial_file(path: Path, place: Path) -> Iterator[tuple[Path, int]]:
    """A file beside the table that becomes the table; locked, so one process at a time updates it.

    Nothing is left behind; the rest of a killed process is overwritten.
    """
    partial = place.with_name(f".{place.name}.partial")
    try:
        descriptor = lock_file(partial, _PATIENCE_SECONDS)
    except BlockingIOError as error:
        reason = f"another process has been writing it for more than {_PATIENCE_SECONDS:.0f} seconds"
        raise DataError(f"{path}: {reason}") from error
    try:
        yield partial, descriptor
    finally:
        if is_at(descriptor, partial):
            partial.unlink()
        os.close(descriptor)


def _content(path: Path, place: Path) -> bytes | None:
    """The content of a table that may be changed; None if there is no such file."""
    try:
        with open_regular(place) as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    if not mode & 0o222 or not os.access(place, os.W_OK):
        raise DataError(f"{path}: is read-only; it is unchanged")
    if len(content) > MAX_BYTES:
        raise DataError(f"{path}: has more than {MAX_BYTES:,} bytes, too many for a results table")
    return content


def _open(path: Path, content: bytes | None, key: Sequence[str]) -> CsvTable | XlsxTable:
    if path.suffix.lower() == ".csv":
        return CsvTable(path, content, key)
    from paceline.loggers.xlsx_table import XlsxTable  # takes a third of a second, which only such files need

    return XlsxTable(path, content, key)


def _put(table: CsvTable | XlsxTable, key: Sequence[str], rows: Sequence[Mapping[str, Value]]) -> None:
    columns: dict[str, int] = {}
    for column in range(table.num_columns):
        columns.setdefault(table.text(0, column), column)  # of two with one name the first is ours
    for name in dict.fromkeys(name for values in rows for name in values):
        if name not in columns:
            columns[name] = table.num_columns
            table.write(0, columns[name], name)
    places: dict[tuple[str, ...], int] = {}
    for row in range(1, table.num_rows):
        places.setdefault(tuple(table.text(row, columns[name]) for name in key), row)
    for values in rows:
        row = places.setdefault(tuple(in_one_line(str(values[name])) for name in key), max(1, table.num_rows))
        for name, value in values.items():
            table.write(row, columns[name], value)


_DELIMITERS = (",", ";", "\t")
_MARK = "\ufeff"


class CsvTable:
    """Cells of a CSV file by row and column, both from 0; the first row is the header. Numbers are without loss."""

    def __init__(self, path: Path, content: bytes | None, key: Sequence[str]) -> None:
        text = _decoded(path, content or b"")
        self._mark = _MARK if text.startswith(_MARK) else ""
        text = text.removeprefix(_MARK)
        self._line_end = "\r\n" if text.partition("\n")[0].endswith("\r") else "\n"
        self._delimiter, self._rows = _parsed(path, text, key)
        while self._rows and not any(self._rows[-1]):
            self._rows.pop()
        self.num_columns = max(map(len, self._rows), default=0)
        self.is_changed = False

    @property
    def num_rows(self) -> int:
        """The number of rows up to the last that is not empty."""
        return len(self._rows)

    def text(self, row: int, column: int) -> str:
        """A cell as it reads; empty where there is none."""
        return from_cell(self._written(row, column))

    def write(self, row: int, column: int, value: Value) -> None:
        """Change a cell, creating it if needed."""
        text = _text_of(value)
        if self._written(row, column) == text:
            return
        self._rows += [[] for _ in range(row + 1 - len(self._rows))]
        cells = self._rows[row]
        cells += [""] * (column + 1 - len(cells))
        cells[column] = text
        self.num_columns = max(self.num_columns, column + 1)
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
