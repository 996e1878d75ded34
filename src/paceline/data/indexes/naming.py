"""Names of files that a list does not hold as such, but in several columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import DataError

_FIELD = re.compile(r"\{([^{}:]+)(?::0(\d{1,2}))?\}")  # {column} or {column:06}
_WHOLE = re.compile(r"([0-9]+)(?:\.0*)?")  # times are often written as 84.0


class NamePattern:
    """A name with columns of the list in braces, as in "{id}_{start:06}.mp4"; `:06` fills a number up to six digits.

    Columns may be numbers, counted from 0, as in "{1}_{2:06}.mp4".
    """

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
        whole = None if digits is None else _WHOLE.fullmatch(cell)
        if digits is None or whole is None:
            expected = "something" if digits is None else "a whole number"
            named = f"column {column}" if column.isdecimal() else repr(column)
            advice = "; if this line names the columns, write names in the pattern" if column.isdecimal() else ""
            found = f"{self._path}, line {line}: {named} is {cell!r}"
            raise DataError(f"{found}, expected {expected} to make a name of{advice}")
        return whole[1].zfill(int(digits))
