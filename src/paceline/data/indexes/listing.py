"""List files, a sample a line: CSV, TSV, JSON lines, and plain text with blanks between the columns.

Lines are read one at a time, so the length of a list does not matter.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from paceline.core.counting import counted
from paceline.core.errors import DataError
from paceline.data.indexes.naming import NamePattern

Format = Literal["csv", "tsv", "jsonl", "txt"]
Column = str | int

_SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "txt",
    ".lst": "txt",
}
_MAX_LINE = 1 << 20  # characters


class Row(NamedTuple):
    """A line of a list: its number, the name of an image, and what stands beside it, None without such a column."""

    line: int
    image: str
    beside: Any


def read_list(
    path: Path, form: Format | None, image: Column | None, beside: Column | None, usual: str, what: str = "image"
) -> Iterator[Row]:
    """The lines of a list file. Columns are given by the names in its first line, or by number, counted from 0.

    A column that is not given is the one called as `what` or `usual` says, if the first line names columns, else the
    first or second one. In tables `image` may also be a `NamePattern`, such as "{id}.jpg". Empty lines are passed
    over. What cannot be understood is a DataError with its line.
    """
    chosen = form or _SUFFIXES.get(path.suffix.lower())
    if chosen is None:
        raise DataError(f"{path}: its name tells no format ({', '.join(_SUFFIXES)}); give `format`")
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            if chosen == "jsonl":
                yield from _json_rows(path, file, image, beside, usual, what)
            else:
                yield from _table_rows(path, _cells(path, file, chosen), image, beside, usual, what)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def at_line(path: Path, line: int) -> str:
    """How messages name a line of a list."""
    return f"{path}, line {line}"


def encode_name(path: Path, line: int, name: str) -> bytes:
    """The name of a file in a list as the bytes that the file system knows it by."""
    try:
        return os.fsencode(name)
    except UnicodeEncodeError as error:
        raise DataError(f"{at_line(path, line)}: {name!r} cannot be the name of a file") from error


def _lines(path: Path, file: IO[str]) -> Iterator[str]:
    number = 0
    while line := file.readline(_MAX_LINE):
        number += 1
        if len(line) == _MAX_LINE and not line.endswith("\n"):
            raise DataError(f"{at_line(path, number)}: longer than {_MAX_LINE:,} characters; this is not a list")
        yield line


def _cells(path: Path, file: IO[str], form: Format) -> Iterator[tuple[int, list[str]]]:
    """The columns of each line that is not empty, and the number of the line."""
    if form == "txt":
        yield from ((number, cells) for number, line in enumerate(_lines(path, file), 1) if (cells := line.split()))
        return
    reader = csv.reader(_lines(path, file), delimiter="," if form == "csv" else "\t", strict=True)
    number = 1
    try:
        for cells in reader:
            if cells:
                yield number, cells
            number = reader.line_num + 1  # a cell in quotes may hold line ends
    except csv.Error as error:
        raise DataError(f"{at_line(path, number)}: not {form.upper()} ({error})") from error


def _table_rows(
    path: Path,
    lines: Iterator[tuple[int, list[str]]],
    image: Column | None,
    beside: Column | None,
    usual: str,
    what: str,
) -> Iterator[Row]:
    first_line, first = next(lines, (1, []))
    if not first:
        raise DataError(f"{path}: the list is empty; expected a line for each sample")
    header = [cell.strip() for cell in first]
    if isinstance(image, str) and "{" in image and image not in header:
        other = _named_beside(path, header, beside, usual)
        yield from _patterned_rows(path, header, lines, NamePattern(path, image), other, what)
        return
    if isinstance(image, str) or isinstance(beside, str) or (image is None and what in header):
        at = _named(path, header, what if image is None else image, what)
        other = _named_beside(path, header, beside, usual)
    else:
        at, other = image or 0, beside if isinstance(beside, int) else 1 if len(first) > 1 else None
        yield _row(path, first_line, first, at, other)
    needed = max(at, -1 if other is None else other)
    for line, cells in lines:
        if needed >= len(cells) or not cells[at]:
            _row(path, line, cells, at, other)
        yield Row(line, cells[at], None if other is None else cells[other])


def _patterned_rows(
    path: Path,
    header: list[str],
    lines: Iterator[tuple[int, list[str]]],
    pattern: NamePattern,
    other: int | None,
    what: str,
) -> Iterator[Row]:
    places = [_named(path, header, column, what) for column in pattern.columns]
    needed = max([-1 if other is None else other, *places])
    for line, cells in lines:
        if needed >= len(cells):
            _row(path, line, cells, needed, None)
        yield Row(line, pattern.name(line, [cells[at] for at in places]), None if other is None else cells[other])


def _row(path: Path, line: int, cells: Sequence[str], at: int, other: int | None) -> Row:
    needed = max(at, -1 if other is None else other)
    if needed >= len(cells):
        found = counted(len(cells), "column")
        raise DataError(f"{at_line(path, line)}: {found}, expected at least {needed + 1}{_advice_on_columns(path)}")
    if not cells[at]:
        raise DataError(f"{at_line(path, line)}: no name of an image in column {at}")
    return Row(line, cells[at], None if other is None else cells[other])


def _advice_on_columns(path: Path) -> str:
    if path.suffix.lower() in (".csv", ".tsv"):
        return ""
    return " as in the lines before; blanks separate columns here, so a list of names with blanks has to be .csv"


def _named(path: Path, header: list[str], column: Column, argument: str) -> int:
    if isinstance(column, int):
        return column
    if column not in header:
        named = ", ".join(header[:20])
        raise DataError(f"{path}: no column {column!r} in its first line, which has {named}; give another `{argument}`")
    return header.index(column)


def _named_beside(path: Path, header: list[str], column: Column | None, usual: str) -> int | None:
    if column is None and len(header) == 1:
        return None
    return _named(path, header, usual if column is None else column, usual)


def _json_rows(
    path: Path, file: IO[str], image: Column | None, beside: Column | None, usual: str, what: str
) -> Iterator[Row]:
    if isinstance(image, int) or isinstance(beside, int):
        raise DataError(f"{path}: columns of JSON lines have names, not numbers; got {image!r} and {beside!r}")
    at, other, expects = image or what, beside or usual, None if beside is None else True
    for line, text in enumerate(_lines(path, file), 1):
        if text.isspace():
            continue
        content = _parsed(path, line, text)
        name = content.get(at)
        if not isinstance(name, str) or not name:
            raise DataError(f"{at_line(path, line)}: {at!r} is {_shown(content, at)}, expected the name of a file")
        has = other in content
        if has != (has if expects is None else expects):
            raise DataError(f"{at_line(path, line)}: has {'a' if has else 'no'} {other!r}, unlike the lines before")
        expects = has
        yield Row(line, name, content.get(other))


def _parsed(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{at_line(path, line)}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f'{at_line(path, line)}: expected an object such as {{"image": "a.jpg"}}, got {text[:40]!r}')
    return content


def _shown(content: dict[str, Any], key: str) -> str:
    return repr(content[key])[:60] if key in content else "not there"
