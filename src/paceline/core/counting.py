"""Numbers of things in messages."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """The number and what is counted, as in "1 process" and "1,003 samples"."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    ending = "es" if noun.endswith(("s", "tch")) else "s"
    return f"{shown} {noun}" if number == 1 else f"{shown} {noun}{ending}"
