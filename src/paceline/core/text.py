"""Text for messages and tables: counts, lists, metrics, and cells that no spreadsheet takes for a formula."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def pluralize(number: float, noun: str) -> str:
    """The number and what is counted, as in "1 process" and "1,003 samples"."""
    count = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    plural = "es" if noun.endswith(("s", "tch")) else "s"
    return f"{count} {noun}" if number == 1 else f"{count} {noun}{plural}"


def evenly_spaced(size: int, number: int) -> list[int]:
    """`number` evenly spaced indices below `size`; all of them if there are fewer."""
    number = min(number, size)
    return [size * place // number for place in range(number)]


def format_metric(metric: float) -> str:
    """A metric with four digits, a count as it is."""
    return f"{metric:,}" if isinstance(metric, int) else f"{metric:.4f}"


def doubled_loss(metrics: Mapping[str, float]) -> str | None:
    """The name of the only loss where there is one, since "loss" beside it says the same; else None."""
    names = list(metrics)
    place = names.index("loss") if "loss" in names else -1
    beside = [names[other] for other in (place - 1, place + 1) if place >= 0 and 0 <= other < len(names)]
    return next((name for name in beside if repr(metrics[name]) == repr(metrics["loss"])), None)


def join_first(things: Any, most: int) -> str:
    """The first of a sequence or array, and how many more there are, as in "2, 3, 5 and 8 more"."""
    more = f" and {len(things) - most:,} more" if len(things) > most else ""
    return ", ".join(str(thing) for thing in things[:most]) + more


_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


def starts_formula(text: str) -> bool:
    """Whether a spreadsheet program may compute the text, or take it for a number."""
    return text.startswith(("=", "+", "-", "@", "\t", "\r"))


def as_cell(text: str) -> str:
    """The text as it is written into a CSV file: behind an apostrophe where it could be a formula but is no number."""
    bare = text.lstrip("'")  # so that what begins with an apostrophe itself differs from what got one
    return f"'{text}" if starts_formula(bare) and _NUMBER.fullmatch(bare) is None else text


def from_cell(cell: str) -> str:
    """The text that `as_cell` wrote."""
    return cell[1:] if cell.startswith("'") and as_cell(cell[1:]) == cell else cell
