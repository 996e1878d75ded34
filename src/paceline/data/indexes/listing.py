"""List files, a sample a line: CSV, TSV, JSON lines, and plain text with blanks between the columns.

Lines are read one at a time, so the length of a list does not matter; only an array of JSON is read whole.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from paceline.core.errors import DataError
from paceline.data.indexes.json_rows import array_entries, json_rows, line_entries
from paceline.data.indexes.rows import Asked, Column, Row, at_line, encode_name
from paceline.data.indexes.table_rows import read_cells, table_rows

__all__ = ["Column", "Format", "Row", "at_line", "encode_name", "read_list"]

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
_HEAD = 1 << 12  # bytes that tell what a file is


def read_list(
    path: Path,
    form: Format | None,
    image: Column | None,
    beside: Column | None,
    usual: str,
    what: str = "image",
    *,
    root: Path | None = None,
    delimiter: str | None = None,
    part: Column | None = None,
    part_key: str = "split_column",
) -> Iterator[Row]:
    """The lines of a list file. Columns are given by the names in its first line, or by number, counted from 0.

    A column that is not given is the one called as `what` or `usual` says, if the first line names columns, else the
    first or second one; without a `usual` name nothing beside is read. `image` may also be a `NamePattern`, such as
    "{id}.jpg" or "{0}.jpg". Empty lines are passed over, and so are those that begin with # unless they name a file
    in `root`, the list's folder unless given. `part` is a third column, which recipes call `part_key`. What cannot be
    understood is a DataError with its line.
    """
    chosen = form or _SUFFIXES.get(path.suffix.lower())
    if chosen is None:
        raise DataError(f"{path}: its name tells no format ({', '.join(_SUFFIXES)}); give `format`")
    asked = Asked(path, root or path.parent, image, beside, usual, what, part, part_key)
    try:
        head = _head(path)
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            if chosen in ("json", "jsonl"):
                is_array = head.removeprefix(BOM_UTF8).lstrip().startswith(b"[")
                yield from json_rows(asked, array_entries(asked, file) if is_array else line_entries(asked, file))
            else:
                yield from table_rows(asked, read_cells(path, file, chosen, delimiter))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _head(path: Path) -> bytes:
    """The beginning of a list, which is found to be text."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if b"\0" in head:
        advice = f"if it is UTF-16, save it as UTF-8: `iconv -f UTF-16 -t UTF-8 {path.name} > new{path.suffix}`"
        raise DataError(f"{path}: not UTF-8, it has bytes of 0; {advice}")
    return head
