"""Results as tables: on the terminal while they come in, and as a page of the documentation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
_PACKAGES = ("paceline", "torch", "torchvision", "numpy", "av", "nvidia-dali-cuda130", "lightning", "accelerate")


@dataclass(frozen=True)
class Goal:
    """What was aimed at, and what came out."""

    text: str
    value: str
    is_met: bool


@dataclass(frozen=True)
class Section:
    """One benchmark: what was compared and how, the metrics, and the goals."""

    title: str
    method: str
    header: Sequence[str]
    rows: list[list[str]]
    goals: list[Goal] = field(default_factory=list)


def show(section: Section) -> None:
    """Print a section for a person at a terminal."""
    print(f"\n{section.title}")
    widths = [max(map(len, column)) for column in zip(section.header, *section.rows, strict=True)]
    for name, *metrics in (section.header, *section.rows):
        aligned = [metric.rjust(width) for metric, width in zip(metrics, widths[1:], strict=True)]
        print("  " + "  ".join([name.ljust(widths[0]), *aligned]))
    for goal in section.goals:
        print(f"  {_verdict(goal)}")


def write_page(sections: Iterable[Section]) -> None:
    """Put these sections into the page of results, in place of what it had of them; others stay as they are."""
    found = _sections(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    text = [
        "# Benchmarks",
        "`make bench` writes this page. `python -m benchmarks NAME` updates one section.",
        machine(),
        "Contestants take short turns within one run. A ratio is the median over rounds of"
        " (cost of the contestant / cost of the reference in the same round). The last column is its middle half.",
    ]
    found |= {section.title: _written(section) for section in sections}
    text += [f"## {title}\n\n{content}" for title, content in found.items()]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n\n".join(text) + "\n", encoding="utf-8")


def _sections(page: str) -> dict[str, str]:
    """The sections of a page by their titles."""
    pieces = [piece.partition("\n") for piece in page.split("\n## ")[1:]]
    return {title: content.strip() for title, _, content in pieces}


def _written(section: Section) -> str:
    load = f"load average {os.getloadavg()[2]:.1f} over the 15 minutes before its end"
    parts = [f"Measured on {time.strftime('%Y-%m-%d')}, {load}.", section.method, _table(section)]
    if section.goals:
        parts.append("\n".join(f"- {_verdict(goal)}" for goal in section.goals))
    return "\n\n".join(parts)


def machine() -> str:
    """The processor, its cores, and the versions."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores; {platform.system()}, Python {platform.python_version()}, {versions}."


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _table(section: Section) -> str:
    rule = ["---", *["---:"] * (len(section.header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (section.header, rule, *section.rows))


def _verdict(goal: Goal) -> str:
    return f"goal: {goal.text}; measured: {goal.value}: {'reached' if goal.is_met else 'NOT reached'}"
