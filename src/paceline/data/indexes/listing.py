"""List files, a sample a line: CSV, TSV, JSON lines, and plain text with blanks between the columns.

Lines are read one at a time, so the length of a list does not matter; only an array of JSON is read whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Literal

from paceline.core.errors import DataError
from paceline.data.indexes.json_rows import array_entries, json_rows, line_entries
from paceline.data.indexes.rows import Asked, Column, Row, at_line, encode_name
from paceline.data.indexes.table_rows import read_cells, table_rows

__all__ = ["Column", "Format", "Row", "at_line", "encode_name", "is_file_in", "read_list"]

Format = Literal["csv", "tsv", "json", "jsonl", "txt"]

_SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "txt",
    ".lst": "txt",
}
_HEAD = 1 << 12  # bytes or characters that tell what a file is


def read_list(
    path: Path,
    form: Format | None,
    image: Column | None,
    beside: Column | None,
    usual: str,
    what: str = "image",
    *,
    is_file: Callable[[str], bool] | None = None,
    delimiter: str | None = None,
    part: Column | None = None,
    part_key: str = "split_column",
    is_fixed: bool = False,
    notes: list[str] | None = None,
) -> Iterator[Row]:
    """The lines of a list file. Columns are given by the names in its first line, or by number, counted from 0.

    A column that is not given is the one called as `what` or `usual` says, if the first line names columns, else the
    first or second one; without a `usual` name nothing beside is read. `image` may also be a `NamePattern`, such as
    "{id}.jpg" or "{0}.jpg". Empty lines are passed over, and so are comments: lines that begin with # and a blank, and
    those that begin with # and name what is no file, as `is_file` tells, which looks in the list's folder unless given.
    `part` is a third column, which recipes call `part_key`. What cannot be understood is a DataError with its line; its
    advice is to change the list if recipes have no keys for columns, `is_fixed`. What is odd, and only that, is added
    to `notes` until the first line comes.
    """
    chosen = form or _SUFFIXES.get(path.suffix.lower())
    if chosen is None:
        advice = "give it one of these endings" if is_fixed else "give `format`"
        raise DataError(f"{path}: its name tells no format ({', '.join(_SUFFIXES)}); {advice}")
    is_file = is_file or partial(is_file_in, path.parent)
    notes = [] if notes is None else notes
    asked = Asked(path, is_file, image, beside, usual, what, part, part_key, is_fixed, notes)
    try:
        _refuse_bytes(path)
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            if chosen in ("json", "jsonl"):
                entries = array_entries if _is_array(file) else line_entries
                yield from json_rows(asked, entries(asked, file))
            else:
                yield from table_rows(asked, read_cells(path, file, chosen, delimiter))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def is_file_in(folder: Path, name: str) -> bool:
    """Whether there is a file of this name in a folder."""
    return os.path.isfile(folder / name)  # noqa: PTH113 - False for what can be no name


def _is_array(file: IO[str]) -> bool:
    """Whether the first that is no blank begins an array; the file is at its beginning again."""
    while (head := file.read(_HEAD)).isspace():
        pass
    file.seek(0)
    return head.lstrip().startswith("[")


def _refuse_bytes(path: Path) -> None:
    """A list is text."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if b"\0" in head:
        advice = f"if it is UTF-16, save it as UTF-8: `iconv -f UTF-16 -t UTF-8 {path.name} > new{path.suffix}`"
        raise DataError(f"{path}: not UTF-8, it has bytes of 0; {advice}")
