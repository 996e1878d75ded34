"""What lists are asked for, and what their lines become."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from paceline.core.errors import DataError
from paceline.data.argument_types import Column

_MAX_LINE = 1 << 20  # characters


class Row(NamedTuple):
    """A line of a list: its number, the name of an image, and what stands beside it, None without such a column."""

    line: int
    image: str
    beside: Any
    part: Any = None


class Asked(NamedTuple):
    """A list, and what is asked of it: the columns, None for the usual ones, and how these are called.

    `is_file` tells whether a name is that of a file. Recipes cannot say anything about columns if `is_fixed`. What
    is to be told about the list is added to `notes`.
    """

    path: Path
    is_file: Callable[[str], bool]
    image: Column | None
    beside: Column | None
    usual: str
    what: str
    part: Column | None
    part_key: str
    is_fixed: bool
    notes: list[str]

    @property
    def pattern(self) -> str | None:
        """The column of names, if it is a pattern of several columns."""
        return self.image if isinstance(self.image, str) and "{" in self.image else None


def at_line(path: Path, line: int) -> str:
    """How messages name a line of a list."""
    return f"{path}, line {line}"


def encode_name(path: Path, line: int, name: str) -> bytes:
    """The name of a file in a list as the bytes that the file system knows it by."""
    try:
        return os.fsencode(name)
    except UnicodeEncodeError as error:
        raise DataError(f"{at_line(path, line)}: {name!r} cannot be the name of a file") from error


def read_lines(path: Path, file: IO[str]) -> Iterator[str]:
    """The lines of a list, none of which may be endless."""
    number = 0
    while line := file.readline(_MAX_LINE):
        number += 1
        if len(line) == _MAX_LINE and not line.endswith("\n"):
            raise DataError(f"{at_line(path, number)}: longer than {_MAX_LINE:,} characters; this is not a list")
        yield line
