"""A table in a CSV file, in the way its author's program writes it: delimiter, line ends and byte order mark stay."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import DataError, in_one_line

_DELIMITERS = (",", ";", "\t")
_MARK = "\ufeff"


class CsvTable:
    """The cells of a CSV file; numbers are written so that reading them gives the same bits."""

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
        """A cell as it is written."""
        cells = self._rows[row] if row < len(self._rows) else []
        return cells[column] if column < len(cells) else ""

    def write(self, row: int, column: int, value: str | int | float | None) -> None:
        """Change a cell, making it if need be."""
        text = _written(value)
        if self.text(row, column) == text:
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
        return (self._mark + "".join(lines)).encode()

    def _quoted(self, cell: str) -> str:
        # The standard writer leaves a carriage return bare where lines end without one, and so cuts the row in two.
        needs_it = any(character in cell for character in (self._delimiter, '"', "\r", "\n"))
        return '"' + cell.replace('"', '""') + '"' if needs_it else cell


def _decoded(path: Path, content: bytes) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (byte {error.start:,}); it stays as it is") from error
    if "\0" in text:
        raise DataError(f"{path}: holds bytes that no text has; it is damaged, or no CSV file, and stays as it is")
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
        raise DataError(f"{path}: cannot be read as CSV ({error}); it stays as it is") from error
    found = in_one_line(text.partition("\n")[0][:60])
    raise DataError(
        f'{path}: is no table of results: its first line, "{found}", lacks the columns {" and ".join(key)};'
        " it stays as it is"
    )


def _written(value: str | int | float | None) -> str:
    if isinstance(value, str):
        return in_one_line(value)
    return "nan" if value is None or not math.isfinite(value) else repr(value)
