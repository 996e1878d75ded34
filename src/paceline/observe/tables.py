"""Tables of results: rows are found by their key and changed in place, and whatever else people put there stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from paceline.core.errors import DataError, UsageError, in_one_line
from paceline.observe.csv_table import CsvTable
from paceline.observe.rewriting import alone_with

SUFFIXES = (".csv", ".xlsx")
MAX_BYTES = 1 << 25
"""The largest file that is taken for a table of results."""
_ATTEMPTS = 3

Value = str | int | float | None
"""What a cell can hold; None stands for a figure that is not finite."""


class Table(Protocol):
    """Cells by row and column, both counted from 0; the first row names the columns."""

    num_rows: int
    """Rows up to the last one that holds something."""
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
    """Refuse, before any work, a file of another kind."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: expected a file that ends in {' or '.join(SUFFIXES)}")


def update_rows(
    path: Path, key: Sequence[str], rows: Sequence[Mapping[str, Value]], further: Sequence[str] = ()
) -> None:
    """Replace the values of those rows in a .csv or .xlsx file whose `key` columns are alike; new ones come last.

    Columns of a `further` key have to be alike too; a table may lack them, and its rows then have them empty.
    All other rows, columns and cells stay as they are, and columns that are new are added behind them. The file is
    replaced as a whole, by one process at a time. One that is damaged, read-only, open in a spreadsheet program or no
    table of results is a DataError, and stays as it is.
    """
    check_suffix(path)
    with alone_with(path) as file:
        for _ in range(_ATTEMPTS):
            table = _open(path, file.read(MAX_BYTES), key)
            _put(table, (*key, *further), rows)
            if not table.is_changed or file.replace(table.dump()):
                return
    raise DataError(f"{path}: was changed again and again while it was being written; it stays as it is")


def _open(path: Path, content: bytes | None, key: Sequence[str]) -> Table:
    if path.suffix.lower() == ".csv":
        return CsvTable(path, content, key)
    from paceline.observe.xlsx_table import XlsxTable  # takes a third of a second, which only such files need

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
