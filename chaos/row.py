"""What a trial found, as a row of the table in the documentation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- figures of make chaos -->", "<!-- end of the figures -->"
_HEADER = "| fault or input | goal | measured | |\n|---|---|---|---|"


@dataclass(frozen=True)
class Row:
    """One fault or kind of input: what was aimed at, what came out, and whether that is enough."""

    fault: str
    goal: str
    measured: str
    is_met: bool

    def __str__(self) -> str:
        return f"| {self.fault} | {self.goal} | {self.measured} | {'reached' if self.is_met else 'NOT reached'} |"


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    return "\n".join([_HEADER, *map(str, rows)])


def write(rows: list[Row]) -> None:
    """Put the table in place of the one that the page holds between two comments."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE}: expected the table between {BEGIN} and {END}")
    text = f"{before}{BEGIN}\n\nMeasured on {time.strftime('%Y-%m-%d')}.\n\n{table(rows)}\n\n{END}{after}"
    PAGE.write_text(text, encoding="utf-8")
