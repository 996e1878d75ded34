"""The columns of a list's index: names of files and labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from paceline.core.errors import DataError
from paceline.data.indexes.index import IndexBuilder
from paceline.data.indexes.labels import LabelBook
from paceline.data.indexes.line_numbers import LineNumbers
from paceline.data.indexes.listed_splits import ListedParts
from paceline.data.indexes.listing import Row, at_line, encode_name

_CHUNK = 1 << 14  # lines that are held as Python objects at a time


def write_list(
    builder: IndexBuilder,
    book: LabelBook,
    rows: Iterator[Row],
    separator: str | None,
    classes: Sequence[str] | None,
    what: str,
    notes: list[str],
) -> int:
    """The columns of an index, a few lines at a time; returns the number of lines.

    Reading the rows may add to the notes, which are written when all have been read.
    """
    file, lines, size = book.path, LineNumbers(builder), 0
    parts = ListedParts(builder, file)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{file}: the list has no {what}s; expected a line for each")
    has_several = separator is not None or isinstance(first.beside, list)
    chunk = [first, *islice(rows, _CHUNK - 1)]
    while chunk:
        builder.texts("image", [encode_name(file, row.line, row.image) for row in chunk])
        if has_several:
            _write_several(builder, book, [_split(file, row, separator) for row in chunk], chunk)
        elif first.beside is not None:
            labels = (book.number(_single(file, row), row.line) for row in chunk)
            builder.numbers("label", np.fromiter(labels, np.int32, len(chunk)))
        if first.part is not None:
            parts.append([row.part for row in chunk])
        lines.append([row.line for row in chunk])
        size += len(chunk)
        chunk = list(islice(rows, _CHUNK))
    parts.finish()
    names = list(classes or [])
    if has_several or first.beside is not None:
        names, meaning = book.classes(classes, size)
        notes = notes + book.notes()
        builder.numbers("meaning", meaning)
    builder.texts("class", [name.encode(errors="surrogatepass") for name in names])
    builder.texts("note", [note.encode(errors="replace") for note in notes])
    return size


def with_folders(file: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """The same rows with the folder that each file lies in beside it."""
    for row in rows:
        folder = PurePosixPath(row.image).parent.name
        if not folder:
            expected = f"`label_from: folder` takes the label from it, as in jump/{PurePosixPath(row.image).name}"
            raise DataError(f"{at_line(file, row.line)}: {row.image!r} has no folder before it; {expected}")
        yield row._replace(beside=folder)


def _write_several(builder: IndexBuilder, book: LabelBook, labels: list[list[str]], chunk: list[Row]) -> None:
    lengths = np.fromiter(map(len, labels), np.uint32, len(labels))
    numbers = [book.number(each, row.line) for row, of_row in zip(chunk, labels, strict=True) for each in of_row]
    builder.ragged("labels", lengths, np.array(numbers, np.int32))


def _split(file: Path, row: Row, separator: str | None) -> list[str]:
    """Several labels; there may be none."""
    if isinstance(row.beside, list):
        return [_text(file, row.line, label) for label in row.beside]
    if separator is None:
        raise DataError(f"{at_line(file, row.line)}: the label is {row.beside!r}, expected a list as in the first line")
    return [label for label in _text(file, row.line, row.beside).split(separator) if label.strip()]


def _single(file: Path, row: Row) -> str:
    return row.beside if type(row.beside) is str else _text(file, row.line, row.beside)


def _text(file: Path, line: int, label: Any) -> str:
    if not isinstance(label, str | int) or isinstance(label, bool):
        raise DataError(f"{at_line(file, line)}: the label is {label!r}, expected a name or a whole number")
    return str(label)
