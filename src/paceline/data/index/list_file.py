"""List files, one sample per row: CSV, TSV, JSON, JSON lines and plain text."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular
from paceline.core.text import join_first, pluralize
from paceline.data.argument_types import Column

Format = Literal["csv", "tsv", "json", "jsonl", "txt"]
Line = tuple[int, list[Any]]
"""The number of a line, or of an item of a JSON file, and its cells: text, in JSON any value, or None if missing."""

_FORMATS: dict[str, Format] = {
    ".csv": "csv", ".tsv": "tsv", ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "txt", ".lst": "txt",
}  # fmt: skip
_DELIMITERS = {",": ",", ";": ";", "\t": "\\t"}  # and how recipes write them
_HEAD = 1 << 12  # characters that tell what a file is
_MAX_NAMES = 20  # columns in a message
_FIELD = re.compile(r"\{([^{}:]+)(?::0(\d{1,2}))?\}")  # {column} or {column:06}
_VALUE = re.compile(r"[+-]?\d+(\.\d+)?|.+\.[A-Za-z]\w{1,3}")
_WHOLE = re.compile(r"([0-9]+)(?:\.0*)?")  # times are often written as 84.0


class Row(NamedTuple):
    """A row of a list: its line, the name of a file, and what the columns of labels and splits hold, if any."""

    line: int
    name: str
    label: Any = None
    part: Any = None


class Columns(NamedTuple):
    """The columns to read, by the name in the header or by number from 0; None is the usual one.

    `name` may be a pattern of columns, such as "{id}_{start:06}.mp4". The keys are the usual names of the columns, and
    what recipes call them; without a `label_key` no labels are read. Without `has_keys`, recipes cannot choose columns.
    """

    name: Column | None = None
    label: Column | None = None
    part: Column | None = None
    name_key: str = "image"
    label_key: str = "label"
    part_key: str = "split_column"
    has_keys: bool = True

    @property
    def pattern(self) -> str | None:
        """The column of names, if it is a pattern."""
        return self.name if isinstance(self.name, str) and "{" in self.name else None


def read_list(
    path: Path, columns: Columns, notes: list[str], form: Format | None = None, delimiter: str | None = None
) -> Iterator[Row]:
    """The rows of a list file. Empty lines and lines that begin with # are skipped.

    A mistake is a DataError with its line. Something odd is added to `notes` before the first row comes.
    """
    chosen = form or _FORMATS.get(path.suffix.lower())
    if chosen is None:
        advice = "give `format`" if columns.has_keys else "rename it"
        raise DataError(f"{path}: its extension is none of {', '.join(_FORMATS)}; {advice}")
    try:
        with TextIOWrapper(open_regular(path), "utf-8-sig", "surrogateescape", "") as file:
            head = file.read(_HEAD)
            if "\0" in head:
                raise DataError(
                    f"{path}: not UTF-8, it has bytes of 0; if it is UTF-16, save it as UTF-8:"
                    f" `iconv -f UTF-16 -t UTF-8 {path.name} > new{path.suffix}`"
                )
            file.seek(0)
            is_json = chosen in ("json", "jsonl")
            if is_json:
                lines = _json_lines(path, file, chosen == "json" and head.lstrip().startswith("["))
            else:
                lines = table_lines(path, file, chosen, delimiter or sniff_delimiter(head, chosen))
            yield from _rows(path, columns, notes, lines, is_json)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def at_line(path: Path, line: int) -> str:
    """How messages name a line of a list, or an item of a JSON file."""
    return f"{path}, {'item' if path.suffix.lower() == '.json' else 'line'} {line}"


def encode_name(path: Path, line: int, name: str) -> bytes:
    """The name of a file in a list as the bytes that the file system knows it by."""
    try:
        return os.fsencode(name)
    except UnicodeEncodeError as error:
        raise DataError(f"{at_line(path, line)}: {name!r} cannot be the name of a file") from error


# --- tables -------------------------------------------------------------------------------------------------


def sniff_delimiter(head: str, form: Format) -> str | None:
    """What separates columns: of CSV a comma, or what the first line has instead; None is whitespace."""
    first = next((line for line in head.splitlines() if line.strip() and not line.startswith("#")), "")
    usual = {"csv": next((each for each in _DELIMITERS if each in first), ","), "tsv": "\t"}
    return usual.get(form)


def table_lines(path: Path, file: IO[str], form: Format, delimiter: str | None) -> Iterator[Line]:
    """The cells of each line that is neither empty nor a comment, and the number of the line."""
    lines = ("\n" if line.lstrip().startswith("#") else line for line in file)
    if delimiter is None:
        yield from ((number, cells) for number, line in enumerate(lines, 1) if (cells := line.split()))
        return
    reader = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=delimiter != " ")
    number = 1
    try:
        for cells in reader:
            if any(cells):
                yield number, cells
            number = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{at_line(path, number)}: not {form.upper()} ({error})") from error


def _rows(path: Path, columns: Columns, notes: list[str], lines: Iterator[Line], is_json: bool) -> Iterator[Row]:
    first = next(lines, None)
    if first is None:
        raise DataError(f"{path}: the list is empty; expected a line for each {columns.name_key}")
    places = _Places(path, columns, first[1], notes, is_json)
    needed = max(places.label or 0, places.part or 0, *places.names)
    for line, cells in lines if places.has_header else chain([first], lines):
        if needed >= len(cells):
            found = f"{at_line(path, line)}: {pluralize(len(cells), 'column')}, expected at least {needed + 1}"
            advice = delimiter_hint(cells, columns.has_keys) or "if names hold spaces, the list has to be .csv"
            raise DataError(f"{found}; {advice}")
        label, part = (None if place is None else cells[place] for place in (places.label, places.part))
        for place, value in ((places.label, label), (places.part, part)):
            if place is not None and value is None:
                raise DataError(f"{at_line(path, line)}: has no {places.called(place)!r}, which all need")
        yield Row(line, places.name(line, cells), label, part)


class _Places:
    """Where the columns of a table are: by its header, if its first line is one, or by number.

    It is one if it has words that are asked for, or the usual ones and neither a number nor the name of a file. Of JSON
    it is the keys of the first object.
    """

    def __init__(self, path: Path, columns: Columns, first: Sequence[str], notes: list[str], is_json: bool) -> None:
        self._path, self._columns, self._first = path, columns, "first object" if is_json else "first line"
        self._cells = [cell.strip() for cell in first]
        self._pattern = NamePattern(path, columns.pattern) if columns.pattern else None
        asked: Sequence[Column | None] = self._pattern.columns if self._pattern else [columns.name]
        if is_json and any(isinstance(each, int) for each in (columns.name, columns.label, columns.part)):
            raise DataError(f"{path}: columns of JSON have names, not numbers")
        usual = {columns.name_key, columns.label_key}
        has_asked = any(each in self._cells for each in (*asked, columns.label, columns.part))
        has_usual = any(cell.lower() in usual for cell in self._cells) and not any(map(_is_value, self._cells))
        self.has_header = is_json or has_asked or has_usual
        self.names = [self._find(each, columns.name_key) for each in asked]
        self.part = None if columns.part is None else self._find(columns.part, columns.part_key)
        self.label = self._find_label(notes) if columns.label_key else None

    def name(self, line: int, cells: Sequence[Any]) -> str:
        """The name of a file."""
        if self._pattern is not None:
            return self._pattern.name(line, [cells[place] for place in self.names])
        cell = cells[self.names[0]]
        if not isinstance(cell, str) or not cell.strip():
            found = f"column {self.called(self.names[0])!r} is {cell!r:.60}"
            raise DataError(f"{at_line(self._path, line)}: {found}, expected the name of a file")
        return cell.strip()

    def called(self, place: int) -> Column:
        """A column by its name, if it has one, or by its number."""
        return self._cells[place] if self.has_header else place

    def _find(self, column: Column | None, key: str) -> int:
        place = self._place(column, key, 0)
        if place is None:
            names = join_first(self._cells, _MAX_NAMES)
            wanted = column or key
            raise DataError(
                f"{self._path}: no column {wanted!r} in its {self._first}, which has {names}; {self._advice(key)}"
            )
        return place

    def _find_label(self, notes: list[str]) -> int | None:
        """The column of labels; lists without one, as those of test images, are noted."""
        column, key = self._columns.label, self._columns.label_key
        place = self._place(column, key, None if 1 in self.names else 1)
        if place is not None and place < len(self._cells):
            return place
        if len(self._cells) > 1 or column is not None:
            cure = f"give its column as `{key}`" if self._columns.has_keys else f"call its column {key!r}"
            found = f"no column {key if column is None else column!r} in the {self._first}"
            notes.append(f"{found}, which has {join_first(self._cells, _MAX_NAMES)}; {cure}")
        return None

    def _place(self, column: Column | None, key: str, usual: int | None) -> int | None:
        """The column of this number or name, or else the usual one."""
        if isinstance(column, int):
            return column
        if not self.has_header:
            return usual if column is None else None
        cells = self._cells if column is not None else [cell.lower() for cell in self._cells]
        wanted = key if column is None else column
        return cells.index(wanted) if wanted in cells else None

    def _advice(self, key: str) -> str:
        hint = delimiter_hint(self._cells, self._columns.has_keys)
        if hint:
            return hint
        if not self._columns.has_keys:
            return f"call the columns {self._columns.name_key} and {self._columns.label_key}"
        if not any(map(_is_value, self._cells)):
            return f"name its column, as in `{key}: {self._cells[0]}`"
        example = '"{0}_{1:06}.mp4"' if self._pattern else "0"
        numbers = f"`{self._columns.name_key}: {example}` and `{self._columns.label_key}: 1`"
        return f"it looks like a sample, not like a header: give columns by number from 0, as in {numbers}"


def _is_value(cell: str) -> bool:
    """Whether a cell is a number or the name of a file, which words of a header are not."""
    return "/" in cell or _VALUE.fullmatch(cell.strip()) is not None


def delimiter_hint(cells: Sequence[str], has_keys: bool = True) -> str:
    """What to do about a line of one column that seems to be several; empty if it does not."""
    held = next((each for each in _DELIMITERS if each in cells[0]), None) if len(cells) == 1 else None
    if held is None:
        return ""
    cure = f'add `delimiter: "{_DELIMITERS[held]}"`' if has_keys else "name the list .csv"
    return f"the line holds {_DELIMITERS[held]!r}; if that separates columns, {cure}"


# --- JSON ---------------------------------------------------------------------------------------------------


def _json_lines(path: Path, file: IO[str], is_array: bool) -> Iterator[Line]:
    """The keys of the first object, then the values that each object has under these keys."""
    keys: list[str] = []
    for line, entry in _entries(path, file, is_array):
        if not isinstance(entry, dict):
            hint = "; a file with an array of objects is .json" if isinstance(entry, list) else ""
            raise DataError(f"{at_line(path, line)}: expected an object, got {json.dumps(entry)[:40]}{hint}")
        if not keys:
            keys = list(entry)
            yield line, keys
        yield line, [entry.get(key) for key in keys]


def _entries(path: Path, file: IO[str], is_array: bool) -> Iterator[tuple[int, Any]]:
    """The items of an array, or of lines of JSON, with their numbers."""
    if is_array:
        try:
            yield from enumerate(json.load(file), 1)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not JSON ({error})") from error
        return
    for number, text in enumerate(file, 1):
        if text.isspace() or text.startswith("#"):
            continue
        try:
            yield number, json.loads(text.rstrip())
        except (ValueError, RecursionError) as error:
            why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            advice = "; expected an array of objects" if path.suffix.lower() == ".json" else ""
            raise DataError(f"{at_line(path, number)}: not JSON ({why}){advice}") from error


# --- names of several columns -------------------------------------------------------------------------------


class NamePattern:
    """A file name made of columns, such as "{id}_{start:06}.mp4"; `:06` pads a whole number to six digits.

    Columns may be numbers, counted from 0, as in "{1}_{2:06}.mp4".
    """

    def __init__(self, path: Path, pattern: str) -> None:
        self._path = path
        # Of each field three: the text before it, its column, its digits; then the text behind the last.
        parts = _FIELD.split(pattern)
        self._texts, self._digits = parts[::3], parts[2::3]
        self.columns: list[Column] = [int(each) if each.isdecimal() else each for each in parts[1::3]]
        if any(brace in text for text in self._texts for brace in "{}"):
            raise DataError(f"{path}: {pattern!r} is no pattern; expected one such as '{{id}}_{{start:06}}.mp4'")

    def name(self, line: int, cells: Sequence[Any]) -> str:
        """The name that the cells of `columns` make, in their order."""
        fields = zip(self.columns, self._digits, ["" if cell is None else str(cell) for cell in cells], strict=True)
        filled = [self._filled(line, column, digits, cell.strip()) for column, digits, cell in fields]
        return "".join(text + field for text, field in zip(self._texts, [*filled, ""], strict=True))

    def _filled(self, line: int, column: Column, digits: str | None, cell: str) -> str:
        whole = _WHOLE.fullmatch(cell)
        if not cell or (digits is not None and whole is None):
            expected = "something" if digits is None else "a whole number"
            raise DataError(f"{at_line(self._path, line)}: column {column!r} is {cell!r}, expected {expected}")
        return cell if digits is None or whole is None else whole[1].zfill(int(digits))
