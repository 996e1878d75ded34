"""What a trial found, as a row of the table in the documentation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- metrics of make chaos -->", "<!-- end of the metrics -->"
_HEADER = "| fault or input | goal | measured | | on |\n|---|---|---|---|---|"


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
    return "\n".join([_HEADER, *(f"{row} |" for row in rows)])


def write(rows: list[Row]) -> None:
    """Put the rows into the table that the page holds between two comments, in place of what it had of them."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    written, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE}: expected the table between {BEGIN} and {END}")
    kept = {line.split("|")[1].strip(): line for line in written.splitlines() if line.startswith("|")}
    kept = {fault: line for fault, line in kept.items() if line not in _HEADER.splitlines()}
    kept |= {row.fault: f"{row} {time.strftime('%Y-%m-%d')} |" for row in rows}
    PAGE.write_text("\n".join([f"{before}{BEGIN}\n", _HEADER, *kept.values(), f"\n{END}{after}"]), encoding="utf-8")
