"""What a benchmark returns, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ratio:
    """A cost or a speed over that of a reference, and the bound that it has to keep."""

    value: float
    bound: float
    is_lower_bound: bool


@dataclass(frozen=True)
class Goal:
    """What was aimed at, and what came out."""

    text: str
    value: str
    is_met: bool
    bound: str = ""
    ratio: Ratio | None = None


def at_most(text: str, value: float, bound: float, form: str = "{:.2f} ×", is_ratio: bool = True) -> Goal:
    """A goal with an upper bound; `form` writes both numbers."""
    ratio = Ratio(value, bound, is_lower_bound=False) if is_ratio else None
    return Goal(text, form.format(value), value <= bound, f"≤ {form.format(bound)}", ratio)


def at_least(text: str, value: float, bound: float, form: str = "{:.2f} ×") -> Goal:
    """A goal with a lower bound; `form` writes both numbers."""
    ratio = Ratio(value, bound, is_lower_bound=True)
    return Goal(text, form.format(value), value >= bound, f"≥ {form.format(bound)}", ratio)


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
        print(f"  goal: {sentence(goal)}")


def sentence(goal: Goal) -> str:
    """A goal in words."""
    bound = f": {goal.bound}" if goal.bound else ""
    return f"{goal.text}{bound}; measured: {goal.value}: {verdict(goal)}"


def verdict(goal: Goal) -> str:
    """Whether it was reached."""
    return "reached" if goal.is_met else "NOT reached"
