"""Results of runs: read from their directories, and written to tables, CSV files or XLSX workbooks.

In a table, rows are updated in place by key; everything else stays.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint.best import best_step
from paceline.core.atomic_write import sync_folder, write_all
from paceline.core.errors import DataError, PacelineError, UsageError, in_one_line, missing_extra
from paceline.core.file_lock import LOCK, is_at, is_held, lock_file
from paceline.core.regular_file import open_regular, read_json
from paceline.core.text import as_cell, from_cell, starts_formula
from paceline.loggers.events import Ended, Event, Logger, Record
from paceline.loggers.jsonl import metrics_of, read_records

SUFFIXES = (".csv", ".xlsx")
_COLUMNS = ("directory", "split")
"""What a results table has; a directory is one run."""
_KEY = (*_COLUMNS, "settings")
"""The columns that identify a row; where there are no settings, they count as empty."""
_MAX_CELLS = 1_000_000
_PATIENCE_SECONDS = 60.0  # others need a fraction of a second; who was stopped while it wrote is not waited for
_MARK = "\ufeff"
_LOST_PARTS = re.compile(
    r"xl/(vbaProject|slicer|timeline|threadedComments|richData|metadata|model|connections|queryTables|ctrlProps|activeX"
    r"|embeddings|diagrams|ink|webextensions)"
)
"""The parts of a workbook that openpyxl drops."""

Value = str | int | float | None
"""A cell; None for a metric that is not finite."""


class About(NamedTuple):
    """Name, task and model of a run."""

    name: str
    task: str
    model: str


@dataclass(frozen=True)
class Result:
    """The metrics of a run on one split; None for values that are not finite."""

    about: About
    folder: Path
    split: str
    state: str
    step: int
    epoch: float
    num_samples: int
    num_skipped: int
    metrics: dict[str, float | None]
    settings: str = ""
    """Overrides given to `paceline eval`."""

    def labels(self, home: Path) -> dict[str, Value]:
        """The cells besides metrics; the directory is relative to the folder `home`."""
        return {
            "run": self.about.name,
            "directory": Path(os.path.relpath(os.path.realpath(self.folder), os.path.realpath(home))).as_posix(),
            "split": self.split,
            "settings": self.settings,
            "task": self.about.task,
            "model": self.about.model,
            "state": self.state,
            "step": self.step,
            "epoch": self.epoch,
            "num_samples": self.num_samples,
            "num_skipped": self.num_skipped,
        }


def write_results(table: Path, results: Sequence[Result]) -> None:
    """Update the rows of these results in a table; see `update_rows`."""
    home = Path(os.path.realpath(table)).parent
    rows = []
    for result in results:
        labels = result.labels(home)
        rows.append(labels | {name: value for name, value in result.metrics.items() if name not in labels})
    update_rows(table, rows)


def read_results(folder: Path, about: About, best: bool = False) -> list[Result]:
    """The last evaluation of each split of a run, or those of its best checkpoint."""
    return read_last_and_best(folder, about)[best]


def read_last_and_best(folder: Path, about: About) -> tuple[list[Result], list[Result]]:
    """The last evaluation of each split of a run, and those of its best checkpoint."""
    state, wanted = read_state(folder), best_step(folder)
    last: dict[str, Record] = {}
    best: dict[str, Record] = {}
    for record in read_records(folder / "metrics.jsonl"):
        if record["split"] != "train":
            last[record["split"]] = record
            if record["step"] == wanted:
                best[record["split"]] = record

    def results(found: dict[str, Record]) -> list[Result]:
        return [_result(folder, about, state, found[split]) for split in sorted(found, key=lambda name: name != "val")]

    return results(last), results(best)


def read_state(folder: Path) -> str:
    """The state in a run's status.json; "killed" if that is "running" and no process is; "unknown" without one."""
    status = read_json(folder / "status.json")
    state = status.get("state") if isinstance(status, dict) else None
    if state == "running" and not is_held(folder / LOCK):
        return "killed"
    return state if isinstance(state, str) else "unknown"


def read_main_metric(folder: Path) -> tuple[str, bool] | None:
    """The metric that a run is judged by and whether its greatest value is best; None if its status does not say."""
    status = read_json(folder / "status.json")
    name = status.get("main_metric") if isinstance(status, dict) else None
    return (name, status.get("direction") != "min") if isinstance(name, str) else None


def _result(folder: Path, about: About, state: str, record: Record) -> Result:
    epoch, num_samples, num_skipped = (_number(record.get(name)) for name in ("epoch", "num_samples", "num_skipped"))
    step, split = record["step"], record["split"]
    return Result(about, folder, split, state, step, epoch, int(num_samples), int(num_skipped), metrics_of(record))


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and math.isfinite(value) else 0


class ResultsRow(Logger):
    """Updates a run's rows in a results table when it is finished.

    It reads what the other sinks wrote, so it comes after them. A table that cannot be written is a warning:
    `paceline results` can write it later.
    """

    def __init__(self, table: Path, folder: Path, about: About, warn: Callable[[str], None]) -> None:
        self._table, self._folder, self._about, self._warn = table, folder, about, warn

    def handle(self, event: Event) -> None:
        if not isinstance(event, Ended) or event.state != "finished":
            return
        try:
            write_results(self._table, read_results(self._folder, self._about))
        except PacelineError as error:
            self._warn(f"{error}. To retry: paceline results {self._folder} --out {self._table}")


def check_suffix(path: Path) -> None:
    """Raise UsageError for other extensions than .csv and .xlsx."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: expected a file with the extension {' or '.join(SUFFIXES)}")


def update_rows(path: Path, rows: Sequence[Mapping[str, Value]]) -> None:
    """Update the rows of a .csv or .xlsx file with the same directory, split and settings; append new ones.

    All other rows, columns and cells stay unchanged, and new columns are appended. The file is replaced atomically, by
    one process at a time. One that is damaged, read-only or not a results table raises DataError and stays unchanged.
    """
    check_suffix(path)
    updated = _updated_csv if path.suffix.lower() == ".csv" else _updated_xlsx
    place = Path(os.path.realpath(path))  # a link stays one: what it leads to is replaced
    partial = place.with_name(f".{place.name}.partial")  # becomes the table; what a killed process left is overwritten
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor = lock_file(partial, _PATIENCE_SECONDS)
        try:
            before = _content(path, place)
            content = updated(path, before or b"", rows)
            if content != before:
                os.ftruncate(descriptor, 0)
                write_all(descriptor, content)
                if before is not None:
                    os.fchmod(descriptor, place.stat().st_mode & 0o777)
                os.fsync(descriptor)
                partial.replace(place)
                sync_folder(place.parent)
        finally:
            if is_at(descriptor, partial):
                partial.unlink()
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error


def _content(path: Path, place: Path) -> bytes | None:
    """The content of a table that may be changed; None if there is no such file."""
    try:
        with open_regular(place) as file:
            if not os.fstat(file.fileno()).st_mode & 0o222 or not os.access(place, os.W_OK):
                raise DataError(f"{path}: is read-only; it is unchanged")
            return file.read()
    except FileNotFoundError:
        return None


def _changes(table: Sequence[Sequence[str]], rows: Sequence[Mapping[str, Value]]) -> Iterator[tuple[int, int, Value]]:
    """The cells to write as row, column and value, counted from 0; the first row of the table is its header."""
    header = list(table[0]) if table else []
    for name in dict.fromkeys(name for values in rows for name in values):
        if name not in header:
            yield 0, len(header), name
            header.append(name)
    columns = [header.index(name) for name in _KEY if name in header]
    places: dict[tuple[str, ...], int] = {}
    for number, cells in enumerate(table[1:], 1):
        places.setdefault(tuple(cells[column] if column < len(cells) else "" for column in columns), number)
    end = max(1, len(table))
    for values in rows:
        named = tuple(in_one_line(str(values.get(header[column], ""))) for column in columns)
        if named not in places:
            places[named] = end
            end += 1
        for name, value in values.items():
            yield places[named], header.index(name), value


def _stored(value: Value) -> str | int | float:
    if isinstance(value, str):
        return in_one_line(value)
    return "nan" if value is None or not math.isfinite(value) else value


def _updated_csv(path: Path, content: bytes, rows: Sequence[Mapping[str, Value]]) -> bytes:
    """The file with rows updated, in its own delimiter and line ends; numbers are without loss."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (byte {error.start:,}); it is unchanged") from error
    mark, first_line = _MARK * text.startswith(_MARK), text.partition("\n")[0]
    delimiter, line_end = max(",;\t", key=first_line.count), "\r\n" if first_line.endswith("\r") else "\n"
    try:
        table = list(csv.reader(io.StringIO(text.removeprefix(_MARK), newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read as CSV ({error}); it is unchanged") from error
    while table and not any(table[-1]):
        table.pop()
    if table and not set(_COLUMNS) <= set(table[0]):
        raise DataError(
            f'{path}: is not a results table: its first line, "{in_one_line(first_line[:60])}", lacks the columns'
            f" {' and '.join(_COLUMNS)}; it is unchanged"
        )
    readable = [[from_cell(cell) for cell in cells] for cells in table]
    # Cells without a name, to the right of the header, stay where they are.
    width = max(map(len, readable), default=0)
    readable[:1] = [[*cells, *[""] * (width - len(cells))] for cells in readable[:1]]
    for row, column, value in _changes(readable, rows):
        table += [[] for _ in range(row + 1 - len(table))]
        table[row] += [""] * (column + 1 - len(table[row]))
        table[row][column] = as_cell(in_one_line(value)) if isinstance(value, str) else str(_stored(value))
    width = len(table[0])
    lines = [[*cells, *[""] * (width - len(cells))] if cells else [] for cells in table]
    written = "".join(delimiter.join(_quoted(cell, delimiter) for cell in cells) + line_end for cells in lines)
    return (mark + written).encode(errors="backslashreplace")


def _quoted(cell: str, delimiter: str) -> str:
    # The standard writer leaves a carriage return bare where lines end without one, and so cuts the row in two.
    needs_it = any(character in cell for character in (delimiter, '"', "\r", "\n"))
    return '"' + cell.replace('"', '""') + '"' if needs_it else cell


def _updated_xlsx(path: Path, content: bytes, rows: Sequence[Mapping[str, Value]]) -> bytes:
    """The workbook with rows updated in the first sheet that has the key columns; text is never a formula."""
    try:
        import openpyxl  # takes a third of a second, which only such files need
    except ModuleNotFoundError as error:
        raise UsageError(f"XLSX tables: {missing_extra('excel') or error}, or name a .csv file") from error
    book = _opened(path, content) if content else openpyxl.Workbook()
    sheet, table = _found_sheet(path, book) if content else (book.active, [])
    try:
        for row, column, value in _changes(table, rows):
            cell, stored = sheet.cell(row + 1, column + 1), _stored(value)
            cell.value = stored
            if isinstance(stored, str):
                cell.data_type = "s"
                cell.quotePrefix = starts_formula(stored)  # it stays text when a person goes through the cell
        stream = io.BytesIO()
        book.save(stream)
    except OSError:
        raise  # it writes sheets to temporary files
    except Exception as error:  # a merged cell, or more columns than the format has
        raise DataError(f"{path}: cannot be written as XLSX: {_described(error)}; it is unchanged") from error
    return stream.getvalue()


def _opened(path: Path, content: bytes) -> Any:
    import openpyxl

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, warnings.catch_warnings(record=True) as caught:
            lost = [name for name in archive.namelist() if _LOST_PARTS.match(name)]
            warnings.filterwarnings("always", category=UserWarning)
            warnings.filterwarnings("ignore", ".*no (default style|stylesheet)")  # of sound files too
            book = openpyxl.load_workbook(io.BytesIO(content), rich_text=True)
    except Exception as error:  # a damaged file makes the library raise whatever it meets
        reason = f"is not a complete XLSX file ({_described(error)}): damaged, password-protected, or of another kind"
        raise DataError(f"{path}: {reason}; it is unchanged") from error
    lost += [in_one_line(str(each.message)) for each in caught]
    if lost:
        raise DataError(f"{path}: would lose content if it were written: {lost[0]}; it is unchanged")
    return book


def _found_sheet(path: Path, book: Any) -> tuple[Any, list[list[str]]]:
    """The first sheet with these columns, and its cells as text up to the last row that is not empty."""
    for sheet in book.worksheets:
        if sheet.max_row * sheet.max_column > _MAX_CELLS:
            size = f"{sheet.max_row:,} rows and {sheet.max_column:,} columns"
            raise DataError(f"{path}: sheet {sheet.title} has {size}, too many for a results table")
        if set(_COLUMNS) <= {cell.value for cell in sheet[1]}:
            cells = sheet.iter_rows(values_only=True)
            table = [["" if value is None else str(value) for value in row] for row in cells]
            while not any(table[-1]):
                table.pop()
            return sheet, table
    columns = " and ".join(_COLUMNS)
    raise DataError(
        f"{path}: is not a results table: no sheet has the columns {columns} in its first row; it is unchanged"
    )


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {in_one_line(str(error))}"
