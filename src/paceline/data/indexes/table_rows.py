"""Lists with columns: CSV, TSV, and text with blanks between."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, NoReturn

from paceline.core.counting import counted
from paceline.core.errors import DataError
from paceline.data.indexes.naming import NamePattern
from paceline.data.indexes.rows import Asked, Column, Row, at_line, read_lines

Cells = tuple[int, list[str]]

_DATA = re.compile(r"[+-]?\d+(\.\d+)?|.*\.[A-Za-z]\w{1,3}|.*/.*")  # what names of columns hardly are
_DELIMITERS = {",": ",", ";": ";", "\t": "\\t"}
"""What tables are separated by, and how recipes write it."""


def read_cells(path: Path, file: IO[str], form: str, delimiter: str | None) -> Iterator[Cells]:
    """The columns of each line that is not empty, and the number of the line."""
    lines = read_lines(path, file)
    if form == "txt" and delimiter is None:
        yield from ((number, cells) for number, line in enumerate(lines, 1) if (cells := line.split()))
        return
    if delimiter is None:
        delimiter, lines = ("\t", lines) if form == "tsv" else _told_by_first_line(lines)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    number = 1
    try:
        for cells in reader:
            if cells:
                yield number, cells
            number = reader.line_num + 1  # a cell in quotes may hold line ends
    except csv.Error as error:
        raise DataError(f"{at_line(path, number)}: not {form.upper()} ({error})") from error


def _told_by_first_line(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """What separates columns: a comma, or what the first line has instead; and all lines."""
    looked_at, first = [], ""
    for first in lines:
        looked_at.append(first)
        if not first.isspace() and not first.startswith("#"):
            break
    return next((each for each in _DELIMITERS if each in first), ","), chain(looked_at, lines)


def table_rows(asked: Asked, lines: Iterator[Cells]) -> Iterator[Row]:
    """The names of files and what stands beside them in each line."""
    first = next((each for each in lines if not _is_comment(asked, each[1])), None)
    if first is None:
        raise DataError(f"{asked.path}: the list is empty; expected a line for each sample")
    header = [cell.strip() for cell in first[1]]
    pattern = NamePattern(asked.path, asked.pattern) if asked.pattern and asked.image not in header else None
    names = [asked.image] if pattern is None else [int(c) if c.isdecimal() else c for c in pattern.columns]
    if _is_header(asked, names, header):
        places = [_place(asked, header, asked.what if name is None else name, asked.what) for name in names]
        other = _place_beside(asked, header)
        part = None if asked.part is None else _place(asked, header, asked.part, asked.part_key)
        rows = lines
    else:
        places = [name if isinstance(name, int) else 0 for name in names]
        other = _number_beside(asked, places, first)
        part = asked.part if isinstance(asked.part, int) else None
        rows = chain([first], lines)
    if pattern is None:
        yield from _plain_rows(asked, rows, places[0], other, part)
    else:
        yield from _patterned_rows(asked, rows, pattern, places, other, part)


def _is_header(asked: Asked, names: Sequence[Column | None], first: list[str]) -> bool:
    """Whether the first line has names of columns, which is so if any is asked for, or a usual one is there."""
    if any(isinstance(name, str) for name in (asked.beside, asked.part, *names)):
        return True
    is_usual = asked.beside is None and len(first) > 1 and asked.usual in first
    return is_usual or (asked.image is None and asked.what in first)


def _is_comment(asked: Asked, cells: list[str]) -> bool:
    """Whether a line that comes before all others is none of the list."""
    if not cells[0].startswith("#"):
        return False
    if asked.pattern is None:
        return asked.image not in cells and not _names_file(asked, cells)
    return not all(name in cells or name.isdecimal() for name in NamePattern(asked.path, asked.pattern).columns)


def _names_file(asked: Asked, cells: list[str]) -> bool:
    return any(os.path.isfile(asked.root / cell) for cell in cells)  # noqa: PTH113 - False for what can be no name


def _plain_rows(asked: Asked, rows: Iterator[Cells], at: int, other: int | None, part: int | None) -> Iterator[Row]:
    needed = max(at, other or 0, part or 0)
    for line, cells in rows:
        if cells[0][:1] == "#" and not _names_file(asked, cells):
            continue
        if needed >= len(cells) or not cells[at]:
            _refuse(asked, line, cells, needed, at)
        beside = None if other is None else cells[other]
        yield Row(line, cells[at], beside, None if part is None else cells[part])


def _patterned_rows(
    asked: Asked,
    rows: Iterator[Cells],
    pattern: NamePattern,
    places: list[int],
    other: int | None,
    part: int | None,
) -> Iterator[Row]:
    needed = max(other or 0, part or 0, *places)
    for line, cells in rows:
        if needed >= len(cells):
            if cells[0].startswith("#"):
                continue
            _refuse(asked, line, cells, needed, places[0])
        beside = None if other is None else cells[other]
        name = pattern.name(line, [cells[at] for at in places])
        yield Row(line, name, beside, None if part is None else cells[part])


def _refuse(asked: Asked, line: int, cells: Sequence[str], needed: int, at: int) -> NoReturn:
    if needed < len(cells):
        what = f"{'an' if asked.what[0] in 'aeiou' else 'a'} {asked.what}"
        raise DataError(f"{at_line(asked.path, line)}: no name of {what} in column {at}")
    found = f"{at_line(asked.path, line)}: {counted(len(cells), 'column')}, expected at least {needed + 1}"
    advice = advice_on_delimiter(cells)
    if advice:
        raise DataError(f"{found}; {advice}")
    if asked.path.suffix.lower() in (".csv", ".tsv"):
        raise DataError(found)
    advice = "blanks separate columns here, so a list of names with blanks has to be .csv"
    raise DataError(f"{found} as in the lines before; {advice}")


def advice_on_delimiter(cells: Sequence[str]) -> str:
    """What to do about a line of one column that seems to be several; empty if it does not."""
    held = next((each for each in _DELIMITERS if each in cells[0]), None) if len(cells) == 1 else None
    if held is None:
        return ""
    return f'the line holds {_DELIMITERS[held]!r}; if that separates columns, add `delimiter: "{_DELIMITERS[held]}"`'


def _place(asked: Asked, header: list[str], column: Column, key: str) -> int:
    if isinstance(column, int):
        return column
    if column not in header:
        found = f"{asked.path}: no column {column!r} in its first line, which has {', '.join(header[:20])}"
        raise DataError(f"{found}; {advice_on_delimiter(header) or _advice_on_names(asked, header, key)}")
    return header.index(column)


def _advice_on_names(asked: Asked, header: list[str], key: str) -> str:
    if not any(map(_DATA.fullmatch, header)):
        return f"give another `{key}`"
    example = '"{0}_{1:06}.mp4"' if asked.pattern else "0"
    numbers = f"`{asked.what}: {example}` and `{asked.usual}: 1`"
    return f"this looks like a sample, not like names of columns: give columns by number from 0, as in {numbers}"


def _place_beside(asked: Asked, header: list[str]) -> int | None:
    if asked.beside is None and (len(header) == 1 or not asked.usual):
        return None
    return _place(asked, header, asked.usual if asked.beside is None else asked.beside, asked.usual)


def _number_beside(asked: Asked, places: list[int], first: Cells) -> int | None:
    if isinstance(asked.beside, int):
        return asked.beside
    if len(first[1]) == 1 or not asked.usual:
        return None
    if asked.pattern and 1 in places:
        found = f"{at_line(asked.path, first[0])}: {', '.join(first[1][:20])}"
        raise DataError(f"{found}: which column is the {asked.usual}? give its number, from 0, as `{asked.usual}`")
    return 1
