"""Rows of CSV, TSV and whitespace-separated list files, with their line numbers."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, NoReturn

import numpy as np

from paceline.core.errors import DataError
from paceline.core.text import pluralize
from paceline.data.argument_types import Column
from paceline.data.index.folders import NamePattern
from paceline.data.index.index_file import Index, IndexWriter
from paceline.data.index.rows import Asked, Row, at_line, read_lines

Cells = tuple[int, list[str]]

_DATA = re.compile(r"[+-]?\d+(\.\d+)?|.*\.[A-Za-z]\w{1,3}|.*/.*")  # what names of columns hardly are
_DELIMITERS = {",": ",", ";": ";", "\t": "\\t"}
"""What tables are separated by, and how recipes write it."""
_SHOWN = 20  # names of columns in a message


def read_cells(path: Path, file: IO[str], form: str, delimiter: str | None) -> Iterator[Cells]:
    """The columns of each line that is neither empty nor begins with # and a blank, and the number of the line."""
    lines = read_lines(path, file)
    if form == "txt" and delimiter is None:
        yield from ((n, cells) for n, line in enumerate(lines, 1) if (cells := line.split()) and cells[0] != "#")
        return
    if delimiter is None:
        delimiter, lines = ("\t", lines) if form == "tsv" else _told_by_first_line(lines)
    yield from _split_lines(path, lines, form, delimiter)


def _told_by_first_line(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """What separates columns: a comma, or what the first line has instead; and all lines."""
    looked_at, first = [], ""
    for first in lines:
        looked_at.append(first)
        if not first.isspace() and not first.startswith("#"):
            break
    return next((each for each in _DELIMITERS if each in first), ","), chain(looked_at, lines)


def _split_lines(path: Path, lines: Iterator[str], form: str, delimiter: str) -> Iterator[Cells]:
    is_begin = True  # of a sample: in quotes, cells may hold line ends, and then what looks like a comment

    def without_comments() -> Iterator[str]:
        nonlocal is_begin
        for line in lines:
            is_comment = is_begin and line.lstrip()[:2].rstrip() == "#"
            is_begin = False
            yield "\n" if is_comment else line

    reader = csv.reader(without_comments(), delimiter=delimiter, strict=True, skipinitialspace=delimiter != " ")
    number = 1
    try:
        for cells in reader:
            is_begin = True
            if cells and cells != [""]:
                yield number, cells
            number = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{at_line(path, number)}: not {form.upper()} ({error})") from error


class _Places(NamedTuple):
    """Where in a line the name of a file stands, or what the pattern makes it of, and the other columns."""

    pattern: NamePattern | None
    names: list[int]
    beside: int | None
    part: int | None


def table_rows(asked: Asked, lines: Iterator[Cells]) -> Iterator[Row]:
    """The names of files and what stands beside them in each line."""
    first = next((each for each in lines if each[1][0][:1] != "#" or _is_meant(asked, each[1])), None)
    if first is None:
        raise DataError(f"{asked.path}: the list is empty; expected a line for each sample")
    header = [cell.strip() for cell in first[1]]
    pattern, names = _name_columns(asked, header)
    is_named = _is_header(asked, names, header)
    if is_named:
        at = [_place(asked, header, asked.what if name is None else name, asked.what) for name in names]
        part = None if asked.part is None else _place(asked, header, asked.part, asked.part_key)
        places = _Places(pattern, at, _place_beside(asked, header), part)
    else:
        at = _numbers(names)
        part = asked.part if isinstance(asked.part, int) else None
        places = _Places(pattern, at, _number_beside(asked, at, first), part)
    samples: Iterator[Cells]
    samples = (each for each in lines if each[1][0][:1] != "#" or _names_file(asked, pattern, at, each[1]))
    if not is_named:
        second = next(samples, None)
        is_named = second is not None and pattern is None and _seems_header(asked, at[0], first, second[1])
        samples = chain([] if is_named else [first], [] if second is None else [second], samples)
    yield from _rows(asked, samples, places)


def _name_columns(asked: Asked, header: list[str]) -> tuple[NamePattern | None, list[Column | None]]:
    """The pattern of names, if there is one that is not itself a column, and the columns that names are made of."""
    if asked.pattern is None or asked.image in header:
        return None, [asked.image]
    pattern = NamePattern(asked.path, asked.pattern)
    return pattern, [int(column) if column.isdecimal() else column for column in pattern.columns]


def _numbers(names: Sequence[Column | None]) -> list[int]:
    return [name if isinstance(name, int) else 0 for name in names]


def _is_meant(asked: Asked, cells: list[str]) -> bool:
    """Whether a line that begins with #, and is the first, has the columns that are asked for, or names a file."""
    header = [cell.strip() for cell in cells]
    pattern, names = _name_columns(asked, header)
    wanted = [asked.what if name is None else name for name in names]
    named = [name for name in (*wanted, asked.beside, asked.part) if isinstance(name, str)]
    if named and set(named).issubset(header):
        return True
    is_numbered = not any(isinstance(name, str) for name in (*names, asked.beside, asked.part))
    return is_numbered and _names_file(asked, pattern, _numbers(names), cells)


def _names_file(asked: Asked, pattern: NamePattern | None, at: list[int], cells: list[str]) -> bool:
    if max(at) >= len(cells):
        return False
    try:
        name = cells[at[0]] if pattern is None else pattern.name(0, [cells[each] for each in at])
    except DataError:
        return False
    return asked.is_file(name)


def _is_header(asked: Asked, names: Sequence[Column | None], first: list[str]) -> bool:
    """Whether the first line has names of columns, which is so if any is asked for, or a usual one is there."""
    if any(isinstance(name, str) for name in (asked.beside, asked.part, *names)):
        return True
    is_usual = asked.beside is None and len(first) > 1 and asked.usual in first
    return is_usual or (asked.image is None and asked.what in first)


def _seems_header(asked: Asked, at: int, first: Cells, second: list[str]) -> bool:
    """Whether the first line has names of columns though none is asked for, which is then noted.

    What it has for the name of a file has neither an ending nor a folder, unlike the second line. A name alone in a
    line of pairs needs neither.
    """
    line, cells = first
    if at >= min(len(cells), len(second)) or (asked.is_fixed and len(cells) == 1):
        return False
    if _is_path(cells[at]) or not _is_path(second[at]) or asked.is_file(cells[at]):
        return False
    shown = ", ".join(cells[:_SHOWN])
    asked.notes.append(f"line {line} is taken for names of columns, as {cells[at]!r} has no ending: {shown}")
    return True


def _is_path(cell: str) -> bool:
    return "/" in cell or bool(PurePosixPath(cell.strip()).suffix)


def _rows(asked: Asked, lines: Iterator[Cells], places: _Places) -> Iterator[Row]:
    pattern, names, other, part = places
    at, needed = names[0], max(other or 0, part or 0, *names)
    for line, cells in lines:
        if needed >= len(cells) or (pattern is None and not cells[at].strip()):
            _refuse(asked, line, cells, needed, at)
        name = _trimmed(asked, cells[at]) if pattern is None else pattern.name(line, [cells[each] for each in names])
        yield Row(line, name, None if other is None else cells[other], None if part is None else cells[part])


def _trimmed(asked: Asked, name: str) -> str:
    """A name without blanks around it, unless there is a file that is called so."""
    trimmed = name.strip()
    return name if trimmed != name and asked.is_file(name) else trimmed


def _refuse(asked: Asked, line: int, cells: Sequence[str], needed: int, at: int) -> NoReturn:
    if needed < len(cells):
        what = f"{'an' if asked.what[0] in 'aeiou' else 'a'} {asked.what}"
        raise DataError(f"{at_line(asked.path, line)}: no name of {what} in column {at}")
    found = f"{at_line(asked.path, line)}: {pluralize(len(cells), 'column')}, expected at least {needed + 1}"
    advice = advice_on_delimiter(cells, asked.is_fixed)
    if advice:
        raise DataError(f"{found}; {advice}")
    if asked.path.suffix.lower() in (".csv", ".tsv"):
        raise DataError(found)
    advice = "blanks separate columns here, so a list of names with blanks has to be .csv"
    raise DataError(f"{found} as in the lines before; {advice}")


def advice_on_delimiter(cells: Sequence[str], is_fixed: bool = False) -> str:
    """What to do about a line of one column that seems to be several; empty if it does not.

    Where recipes have no key for it, `is_fixed`, the list has to have another name.
    """
    held = next((each for each in _DELIMITERS if each in cells[0]), None) if len(cells) == 1 else None
    if held is None:
        return ""
    cure = "name the list .csv" if is_fixed else f'add `delimiter: "{_DELIMITERS[held]}"`'
    return f"the line holds {_DELIMITERS[held]!r}; if that separates columns, {cure}"


def _place(asked: Asked, header: list[str], column: Column, key: str) -> int:
    if isinstance(column, int):
        return column
    if column not in header:
        found = f"{asked.path}: no column {column!r} in its first line, which has {', '.join(header[:_SHOWN])}"
        raise DataError(f"{found}; {advice_on_delimiter(header) or _advice_on_names(asked, header, key)}")
    return header.index(column)


def _advice_on_names(asked: Asked, header: list[str], key: str) -> str:
    if asked.is_fixed:
        return f"call the columns {asked.what} and {asked.usual}"
    if not any(map(_DATA.fullmatch, header)):
        return f"give another `{key}`"
    example = '"{0}_{1:06}.mp4"' if asked.pattern else "0"
    numbers = f"`{asked.what}: {example}` and `{asked.usual}: 1`"
    return f"this looks like a sample, not like names of columns: give columns by number from 0, as in {numbers}"


def _place_beside(asked: Asked, header: list[str]) -> int | None:
    """The column beside names; without one of the usual name, there is none unless it was asked for."""
    if asked.beside is not None or asked.usual in header:
        return _place(asked, header, asked.usual if asked.beside is None else asked.beside, asked.usual)
    if asked.usual and len(header) > 1:
        cure = f"call it {asked.usual!r}" if asked.is_fixed else f"give it as `{asked.usual}`"
        shown = ", ".join(header[:_SHOWN])
        asked.notes.append(f"no column {asked.usual!r} in its first line, which has {shown}; if one is it, {cure}")
    return None


def _number_beside(asked: Asked, places: list[int], first: Cells) -> int | None:
    if isinstance(asked.beside, int):
        return asked.beside
    if len(first[1]) == 1 or not asked.usual:
        return None
    if 1 not in places:
        return 1
    question = f"which column is the {asked.usual}? give its number, from 0, as `{asked.usual}`"
    if asked.pattern:
        raise DataError(f"{at_line(asked.path, first[0])}: {', '.join(first[1][:_SHOWN])}: {question}")
    asked.notes.append(question)
    return None


class LineNumbers:
    """Notes where the distance of a sample's number and its line changes: hardly ever, unless lines are empty."""

    def __init__(self, writer: IndexWriter) -> None:
        self._writer = writer
        self._size, self._distance = 0, -1

    def append(self, lines: Sequence[int]) -> None:
        """The lines of the next samples."""
        rows = np.arange(self._size, self._size + len(lines))
        distances = np.array(lines, np.int64) - rows
        changed = np.flatnonzero(np.diff(distances, prepend=self._distance))
        self._writer.numbers("line.row", rows[changed])
        self._writer.numbers("line.distance", distances[changed])
        self._size += len(lines)
        self._distance = int(distances[-1])


def find_line(index: Index, row: int) -> int:
    """The line of sample `row`."""
    last = int(np.searchsorted(index.numbers("line.row"), row, side="right")) - 1
    return row + int(index.numbers("line.distance")[last])
