"""Text in the cells of a table: a spreadsheet program must not take the name of a file or a class for a formula."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


def starts_formula(text: str) -> bool:
    """Whether a spreadsheet program may compute the text, or take it for a number."""
    return text.startswith(("=", "+", "-", "@", "\t", "\r"))


def as_cell(text: str) -> str:
    """The text as it is written into a CSV file: behind an apostrophe where it could be a formula but is no number."""
    bare = text.lstrip("'")  # so that what begins with an apostrophe itself can be told from what got one
    return f"'{text}" if starts_formula(bare) and _NUMBER.fullmatch(bare) is None else text


def from_cell(cell: str) -> str:
    """The text that `as_cell` wrote."""
    return cell[1:] if cell.startswith("'") and as_cell(cell[1:]) == cell else cell
