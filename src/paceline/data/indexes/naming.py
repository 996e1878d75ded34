"""Names of files that a list does not hold as such, but in several columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import DataError

_FIELD = re.compile(r"\{([^{}:]+)(?::0(\d{1,2}))?\}")  # {column} or {column:06}


class NamePattern:
    """A name with columns of the list in braces, as in "{id}_{start:06}.mp4"; `:06` fills a number up to six digits."""

    def __init__(self, path: Path, pattern: str) -> None:
        self._path = path
        # Of each field three: the text before it, its column, its digits; then the text behind the last.
        parts = _FIELD.split(pattern)
        self._texts, self.columns, self._digits = parts[::3], parts[1::3], parts[2::3]
        if any(brace in text for text in self._texts for brace in "{}"):
            raise DataError(
                f"{path}: {pattern!r} is no pattern of names; expected one such as '{{id}}_{{start:06}}.mp4'"
            )

    def name(self, line: int, cells: Sequence[str]) -> str:
        """The name that the cells of `columns` make, in their order."""
        fields = zip(self.columns, self._digits, cells, strict=True)
        filled = [self._filled(line, column, digits, cell.strip()) for column, digits, cell in fields]
        return "".join(text + field for text, field in zip(self._texts, [*filled, ""], strict=True))

    def _filled(self, line: int, column: str, digits: str | None, cell: str) -> str:
        if digits is None and cell:
            return cell
        if digits is None or not (cell.isascii() and cell.isdigit()):
            expected = "something" if digits is None else "a whole number"
            raise DataError(f"{self._path}, line {line}: {column!r} is {cell!r}, expected {expected} to make a name of")
        return cell.zfill(int(digits))
