"""Results tables in XLSX workbooks; formats, formulas, comments and other sheets stay."""

from __future__ import annotations

import io
import math
import re
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any
from xml.parsers import expat

import openpyxl
from openpyxl.cell.cell import MergedCell
from openpyxl.styles import Font
from openpyxl.utils import column_index_from_string, get_column_letter
from openpyxl.writer.excel import ExcelWriter

from paceline.core.errors import DataError, in_one_line
from paceline.core.text import starts_formula

_SHEET = "results"
_MAX_ROWS, _MAX_COLUMNS = 1 << 20, 1 << 14  # of the format
_HARMLESS = ("no default style", "no stylesheet")  # warnings that sound files cause too


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
        if row >= _MAX_ROWS or column >= _MAX_COLUMNS:
            raise DataError(
                f"{self._path}: needs more than the {_MAX_COLUMNS:,} columns or {_MAX_ROWS:,} rows of an XLSX"
                " file; use a .csv file instead; it is unchanged"
            )
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
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
                ExcelWriter(self._book, archive).save()
        except OSError:
            raise  # it writes sheets to temporary files
        except Exception as error:
            reason = f"{type(error).__name__}: {in_one_line(str(error))}"
            raise DataError(f"{self._path}: cannot be written again: {reason}; it is unchanged") from error
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
        archive = zipfile.ZipFile(io.BytesIO(content))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise DataError(
            f"{path}: is not a complete XLSX file ({error}): damaged, password-protected, or of another kind;"
            " it is unchanged"
        ) from error
    with archive:
        check_parts(path, archive)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            book = openpyxl.load_workbook(io.BytesIO(content), rich_text=True)
        except Exception as error:  # a damaged file makes the library raise whatever it meets
            raise DataError(
                f"{path}: is damaged: {type(error).__name__}: {in_one_line(str(error))}; it is unchanged"
            ) from error
    lost = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    lost = [text for text in lost if not any(harmless in text for harmless in _HARMLESS)]
    if lost:
        raise DataError(f"{path}: would lose content if it were written: {in_one_line(lost[0])}; it is unchanged")
    return book


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
    if sheet.max_row * sheet.max_column > MAX_CELLS:
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


MAX_CELLS = 1_000_000
_MAX_UNPACKED = 1 << 26
_MAX_PARTS = 2_000
_MAX_ELEMENTS = 3 * MAX_CELLS
_LOST = (
    "xl/vbaProject", "xl/slicers/", "xl/slicerCaches/", "xl/timelines/", "xl/timelineCaches/", "xl/threadedComments/",
    "xl/richData/", "xl/metadata.xml", "xl/model/", "xl/connections.xml", "xl/queryTables/", "xl/ctrlProps/",
    "xl/activeX/", "xl/embeddings/", "xl/diagrams/", "xl/ink/", "xl/webextensions/",
)  # fmt: skip
_SHAPES = {"sp", "grpSp", "cxnSp"}
_EXPANDED = {"mergeCell", "hyperlink"}  # of these every cell is made when the workbook is read
_RANGE = re.compile(r"\$?([A-Za-z]{1,3})\$?(\d{1,7}):\$?([A-Za-z]{1,3})\$?(\d{1,7})")


def check_parts(path: Path, archive: zipfile.ZipFile) -> None:
    """Raise DataError unless the workbook is small, well-formed, and can be written again without loss."""
    parts = archive.infolist()
    unpacked = sum(part.file_size for part in parts)
    if len(parts) > _MAX_PARTS or unpacked > _MAX_UNPACKED:
        size = f"{len(parts):,} parts of {unpacked:,} bytes"
        raise DataError(f"{path}: unpacks to {size}, too much for a results table; it is unchanged")
    reader = _Reader(path)
    for part in parts:
        if part.filename.startswith(_LOST):
            raise DataError(f"{path}: would lose {part.filename} if it were written; it is unchanged")
        try:
            content = archive.read(part)
            if part.filename.endswith((".xml", ".rels")):
                reader.read(part.filename, content)
        except (expat.ExpatError, zipfile.BadZipFile, zlib.error, LookupError, ValueError, OSError, EOFError) as error:
            raise DataError(f"{path}: is damaged: {part.filename}: {error}; it is unchanged") from error
        except (RuntimeError, NotImplementedError) as error:
            raise DataError(f"{path}: cannot be unpacked: {part.filename}: {error}; it is unchanged") from error


class _Reader:
    """Scans XML without building a tree."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, ""
        self.elements = self.cells = 0

    def read(self, part: str, content: bytes) -> None:
        self.part = part
        parser = expat.ParserCreate()
        parser.StartDoctypeDeclHandler = self._refuse_doctype
        parser.StartElementHandler = self._start
        parser.Parse(content, True)

    def _refuse_doctype(self, *_: object) -> None:
        raise DataError(f"{self.path}: {self.part} has a DOCTYPE, which can make a small file huge; it is unchanged")

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        name = tag.rpartition(":")[2]
        self.elements += 1
        if name in _EXPANDED:
            self.cells += _area(attributes.get("ref", ""))
        if self.elements > _MAX_ELEMENTS or self.cells > MAX_CELLS:
            raise DataError(f"{self.path}: {self.part} holds too much for a results table; it is unchanged")
        if name in _SHAPES and self.part.startswith("xl/drawings/"):
            raise DataError(f"{self.path}: would lose the shapes of {self.part} if it were written; it is unchanged")


def _area(reference: str) -> int:
    found = _RANGE.fullmatch(reference)
    if found is None:
        return 1
    left, top, right, bottom = found.groups()
    width: int = abs(column_index_from_string(right) - column_index_from_string(left)) + 1
    return width * (abs(int(bottom) - int(top)) + 1)
