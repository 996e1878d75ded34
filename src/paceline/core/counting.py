"""Numbers of things, some of them chosen, and lists of them in messages."""

from __future__ import annotations

from typing import Any


def counted(number: float, noun: str) -> str:
    """The number and what is counted, as in "1 process" and "1,003 samples"."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    ending = "es" if noun.endswith(("s", "tch")) else "s"
    return f"{shown} {noun}" if number == 1 else f"{shown} {noun}{ending}"


def spread(size: int, number: int) -> list[int]:
    """So many of the numbers below `size`, at equal distances; all, if there are not more."""
    number = min(number, size)
    return [size * place // number for place in range(number)]


def shown(figure: float) -> str:
    """A figure with four digits, a count as it is."""
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:.4f}"


def listed(things: Any, most: int) -> str:
    """The first of a sequence or array, and how many more there are, as in "2, 3, 5 and 8 more"."""
    more = f" and {len(things) - most:,} more" if len(things) > most else ""
    return ", ".join(str(thing) for thing in things[:most]) + more
