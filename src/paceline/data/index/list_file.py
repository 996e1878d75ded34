"""List files, one sample per row: CSV, TSV, JSON, JSON lines and plain text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, Literal

from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular
from paceline.data.argument_types import Column
from paceline.data.index.folders import NamePattern
from paceline.data.index.rows import Asked, Row, at_line, encode_name, read_lines
from paceline.data.index.table_rows import read_cells, table_rows

__all__ = ["Format", "Row", "at_line", "encode_name", "is_file_in", "read_list"]

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
        with TextIOWrapper(open_regular(path), "utf-8-sig", "surrogateescape", "") as file:
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
    with open_regular(path) as file:
        head = file.read(_HEAD)
    if b"\0" in head:
        advice = f"if it is UTF-16, save it as UTF-8: `iconv -f UTF-16 -t UTF-8 {path.name} > new{path.suffix}`"
        raise DataError(f"{path}: not UTF-8, it has bytes of 0; {advice}")


_BEGINNING = re.compile(r"\s*\[\s*")
_NEXT = re.compile(r"\s*(?:,\s*|(?=\]))")  # to the next object of an array, or its end
_SHOWN = 20  # keys in a message

Entries = Iterator[tuple[int, dict[str, Any]]]


def line_entries(asked: Asked, file: IO[str]) -> Entries:
    """The objects of JSON lines, with the numbers of the lines."""
    for line, text in enumerate(read_lines(asked.path, file), 1):
        try:
            content = json.loads(text.rstrip())
        except (ValueError, RecursionError) as error:
            if text.isspace() or text.lstrip().startswith("#"):
                continue
            expected = f"; expected an array, [{_example(asked)}, …]" if asked.path.suffix.lower() == ".json" else ""
            raise DataError(f"{at_line(asked.path, line)}: not JSON ({_reason(error)}){expected}") from error
        yield line, content if type(content) is dict else _object(asked, line, content)


def array_entries(asked: Asked, file: IO[str]) -> Entries:
    """The objects of an array, with the numbers of the lines that they begin in."""
    text, decoder = file.read(), json.JSONDecoder()
    beginning = _BEGINNING.match(text)
    assert beginning is not None, "the file was found to begin so"
    last, at, line = 0, beginning.end(), 1
    while not text.startswith("]", at):
        line += text.count("\n", last, at)
        last = at
        try:
            content, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            line = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise DataError(f"{at_line(asked.path, line)}: not JSON ({_reason(error)})") from error
        yield line, _object(asked, line, content)
        gap = _NEXT.match(text, end)
        if gap is None:
            raise DataError(f"{at_line(asked.path, line)}: not JSON (no comma and no ] behind this object)")
        at = gap.end()
    rest = text[at + 1 :].lstrip()
    if rest:
        line = 1 + text.count("\n", 0, len(text) - len(rest))
        found = f"{rest[:20]!r} behind the ] that ends the array"
        raise DataError(f"{at_line(asked.path, line)}: not JSON ({found}); put all objects into one array")


def _reason(error: Exception) -> str:
    """Why something is not JSON, without the line, which the message has already."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _object(asked: Asked, line: int, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        found = json.dumps(content)[:40]
        raise DataError(f"{at_line(asked.path, line)}: expected an object such as {_example(asked)}, got {found}")
    return content


def _example(asked: Asked) -> str:
    beside = {"mask": "a.png"} if asked.usual == "mask" else {"label": "cat"}
    return json.dumps({asked.what: "a.mp4" if asked.what == "video" else "a.jpg"} | beside)


def json_rows(asked: Asked, entries: Entries) -> Iterator[Row]:
    """The names of files and what stands beside them in each object."""
    path = asked.path
    number = next((each for each in (asked.image, asked.beside, asked.part) if isinstance(each, int)), None)
    if number is not None:
        raise DataError(f"{path}: columns of JSON lines have names, not numbers; got {number}")
    pattern = None if asked.pattern is None else NamePattern(path, asked.pattern)
    at, other, part = (str(each or "") for each in (asked.image or asked.what, asked.beside or asked.usual, asked.part))
    expects = None if asked.beside is None else True
    for line, content in entries:
        name = content.get(at) if pattern is None else _patterned(asked, pattern, line, content)
        if not isinstance(name, str) or not name:
            found = _shown(content, at)
            raise DataError(f"{at_line(path, line)}: {at!r} is {found}, expected the name of a file; {_advice(asked)}")
        has = other in content
        if has != (has if expects is None else expects):
            found = f"has {'a' if has else 'no'} {other!r}, unlike the lines before or what `{asked.usual}` asks for"
            raise DataError(f"{at_line(path, line)}: {found}; it has {_keys(content)}")
        expects = has
        if part and part not in content:
            found = f"has no {part!r}, which `{asked.part_key}` asks for"
            raise DataError(f"{at_line(path, line)}: {found}; it has {_keys(content)}")
        beside, word = content.get(other), content.get(part)
        if (has and beside is None) or (part and word is None):
            key = part if part and word is None else other
            cure = "the object" if key == part else "the key of all objects"
            found = f"{key!r} is null, expected a word or a number"
            raise DataError(f"{at_line(path, line)}: {found}; give one, or take {cure} out")
        yield Row(line, name, beside, word)


def _patterned(asked: Asked, pattern: NamePattern, line: int, content: dict[str, Any]) -> str:
    for column in pattern.columns:
        value = content.get(column)
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            expected = "expected a text or a number to make a name of"
            raise DataError(f"{at_line(asked.path, line)}: {column!r} is {_shown(content, column)}, {expected}")
    return pattern.name(line, [str(content[column]) for column in pattern.columns])


def _advice(asked: Asked) -> str:
    if asked.is_fixed:
        return f"call its key {asked.what!r}, and that of what belongs to it {asked.usual!r}"
    example = "a.mp4" if asked.what == "video" else "a.jpg"
    return f'give its key as `{asked.what}`, or a pattern such as "{{id}}{example[1:]}"'


def _shown(content: dict[str, Any], key: str) -> str:
    if key in content:
        return repr(content[key])[:60]
    return f"not there (there are {_keys(content)})"


def _keys(content: dict[str, Any]) -> str:
    return ", ".join(list(content)[:_SHOWN]) or "no keys"
