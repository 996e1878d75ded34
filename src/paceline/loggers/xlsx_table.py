"""Results tables in XLSX workbooks; formats, formulas, comments and other sheets stay."""

from __future__ import annotations

import io
import math
import re
import warnings
import zipfile
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError, UsageError, in_one_line
from paceline.core.extras import missing_extra
from paceline.core.text import starts_formula

try:
    import openpyxl
    from openpyxl.cell.cell import MergedCell
    from openpyxl.styles import Font
    from openpyxl.utils import get_column_letter
except ModuleNotFoundError as error:
    raise UsageError(f"XLSX tables: {missing_extra('excel') or error}, or name a .csv file") from error

_SHEET = "results"
_MAX_CELLS = 1_000_000
_MAX_COLUMNS = 1 << 14  # of the format
_HARMLESS = ("no default style", "no stylesheet")  # warnings that sound files cause too
_LOST = re.compile(
    r"xl/(vbaProject|slicer|timeline|threadedComments|richData|metadata|model|connections|queryTables|ctrlProps|activeX"
    r"|embeddings|diagrams|ink|webextensions)"
)
"""The parts of a workbook that the library drops, as it does shapes in drawings."""
_SHAPE = re.compile(rb"<(\w+:)?(sp|grpSp|cxnSp)\b")


class XlsxTable:
    """The cells of the first sheet that has the key columns; text is never a formula."""

    def __init__(self, path: Path, content: bytes | None, key: Sequence[str]) -> None:
        self._path = path
        if content is None:
            self._book: Any = openpyxl.Workbook()
            self._sheet: Any = self._book.active
            self._sheet.title, self._sheet.freeze_panes = _SHEET, "A2"
        else:
            self._book = _opened(path, content)
            self._sheet = _found_sheet(path, self._book, key)
        self.num_rows, self.num_columns = _extent(path, self._sheet)
        self.is_changed = False

    def text(self, row: int, column: int) -> str:
        """A cell as it reads."""
        return _text(self._sheet, row, column)

    def write(self, row: int, column: int, value: str | int | float | None) -> None:
        """Change the value of a cell and keep its format."""
        if column >= _MAX_COLUMNS:
            most = f"{_MAX_COLUMNS:,} columns of an XLSX file"
            raise DataError(f"{self._path}: needs more than the {most}; use a .csv file instead; it is unchanged")
        cell = self._sheet.cell(row + 1, column + 1)
        if isinstance(cell, MergedCell):
            raise DataError(f"{self._path}: cell {cell.coordinate} is merged with others; unmerge it")
        value = _stored(value)
        if isinstance(cell.value, str) == isinstance(value, str) and cell.value == value and cell.data_type != "f":
            return
        cell.value = value
        if isinstance(value, str):
            cell.data_type = "s"
            if starts_formula(value):
                cell.quotePrefix = True  # it stays text when a person goes through the cell
        if row == 0:
            self._dress(column)
        self.num_rows, self.num_columns = max(self.num_rows, row + 1), max(self.num_columns, column + 1)
        self.is_changed = True

    def dump(self) -> bytes:
        """The whole workbook."""
        stream = io.BytesIO()
        try:
            self._book.save(stream)
        except OSError:
            raise  # it writes sheets to temporary files
        except Exception as error:
            raise DataError(f"{self._path}: cannot be written as XLSX: {_described(error)}; it is unchanged") from error
        return stream.getvalue()

    def _dress(self, column: int) -> None:
        """Give the header of a new column the format of the one before it."""
        cell = self._sheet.cell(1, column + 1)
        if column:
            cell._style = copy(self._sheet.cell(1, column)._style)
        else:
            cell.font = Font(bold=True)
        letter = get_column_letter(column + 1)
        if letter not in self._sheet.column_dimensions:
            self._sheet.column_dimensions[letter].width = max(12, len(str(cell.value)) + 2)


def _opened(path: Path, content: bytes) -> Any:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, warnings.catch_warnings(record=True) as caught:
            lost = [name for name in archive.namelist() if _LOST.match(name) or _has_shapes(archive, name)]
            warnings.simplefilter("always")
            book = openpyxl.load_workbook(io.BytesIO(content), rich_text=True)
    except Exception as error:  # a damaged file makes the library raise whatever it meets
        raise DataError(
            f"{path}: is not a complete XLSX file ({_described(error)}): damaged, password-protected, or of another"
            " kind; it is unchanged"
        ) from error
    texts = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    lost += [in_one_line(text) for text in texts if not any(harmless in text for harmless in _HARMLESS)]
    if lost:
        raise DataError(f"{path}: would lose content if it were written: {lost[0]}; it is unchanged")
    return book


def _has_shapes(archive: zipfile.ZipFile, name: str) -> bool:
    return name.startswith("xl/drawings/") and _SHAPE.search(archive.read(name)) is not None


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {in_one_line(str(error))}"


def _found_sheet(path: Path, book: Any, key: Sequence[str]) -> Any:
    for sheet in book.worksheets:
        width = _extent(path, sheet)[1]
        if set(key) <= {_text(sheet, 0, column) for column in range(width)}:
            return sheet
    raise DataError(
        f"{path}: is not a results table: no sheet has the columns {' and '.join(key)} in its first row;"
        " it is unchanged"
    )


def _extent(path: Path, sheet: Any) -> tuple[int, int]:
    """The number of rows and columns up to the last that is not empty."""
    if sheet.max_row * sheet.max_column > _MAX_CELLS:
        size = f"{sheet.max_row:,} rows and {sheet.max_column:,} columns"
        raise DataError(f"{path}: sheet {sheet.title} has {size}, too many for a results table")
    filled = [cell for row in sheet.iter_rows() for cell in row if cell.value is not None]
    return max((cell.row for cell in filled), default=0), max((cell.column for cell in filled), default=0)


def _stored(value: str | int | float | None) -> str | int | float:
    """A value as it will be read back: the library writes 16 digits, and the format only has finite numbers."""
    if isinstance(value, str):
        return in_one_line(value)
    return "nan" if value is None or not math.isfinite(value) else float(f"{value:.16g}")


def _text(sheet: Any, row: int, column: int) -> str:
    value = sheet.cell(row + 1, column + 1).value
    return "" if value is None else str(value)
