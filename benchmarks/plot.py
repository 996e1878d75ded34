"""The plot of the page of results: what a step costs in each framework, and every ratio beside its goal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Goal, Ratio, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# On a white ground, with colors that a color-blind reader tells apart: readable on light and dark pages alike.
_REACHED, _MISSED, _ALLOWED = "#0072b2", "#d55e00", "#cfe8d5"
_COLORS = ("#0072b2", "#e69f00", "#009e73")
_MARKS = ("o", "s", "^")
_ROW_INCHES, _HEAD_INCHES, _WIDTH_INCHES, _DPI = 0.3, 1.1, 11.0, 110
_LEAST, _MOST = 0.02, 100.0
_LONGEST = 82


def draw_overview(sections: Mapping[str, Section], path: Path) -> None:
    """Write the plot as a PNG file."""
    from matplotlib.figure import Figure

    contestants = _step_ratios(sections["step"]) if "step" in sections else {}
    ratios = [(goal, goal.ratio) for section in sections.values() for goal in section.goals if goal.ratio is not None]
    rows = [len(contestants) + 1, len(ratios) + 1]
    height = sum(rows) * _ROW_INCHES + 2 * _HEAD_INCHES
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, height_ratios=rows)
    _draw_step(top, contestants)
    _draw_goals(bottom, ratios)
    figure.savefig(path, metadata={"Software": None})


def _step_ratios(section: Section) -> dict[str, dict[str, float]]:
    """The ratio of each contestant of the step benchmark, by network."""
    found: dict[str, dict[str, float]] = {}
    columns = [list(section.header).index(name) for name in ("contestant", "network", "ratio")]
    for row in section.rows:
        name, network, ratio = (row[column] for column in columns)
        found.setdefault(name, {})[network] = float(ratio)
    return found


def _draw_step(axes: Axes, contestants: Mapping[str, Mapping[str, float]]) -> None:
    networks = list(next(iter(contestants.values()), {}))
    for network, color, mark in zip(networks, _COLORS, _MARKS, strict=False):
        values = [by_network[network] for by_network in contestants.values()]
        axes.plot(values, range(len(values)), mark, color=color, label=network, markersize=6)
    axes.set_title("Time of a training step, relative to a hand-written loop (less is better)", loc="left", fontsize=11)
    axes.set_yticks(range(len(contestants)), list(contestants), fontsize=8.5)
    axes.set_xscale("log")
    ticks = [1, 1.2, 1.5, 2, 3, 5]
    axes.set_xticks(ticks, [f"{tick:g} ×" for tick in ticks])
    axes.minorticks_off()
    if networks:
        axes.legend(fontsize=8.5, frameon=True)
    _finish(axes, len(contestants))


def _draw_goals(axes: Axes, ratios: list[tuple[Goal, Ratio]]) -> None:
    for row, (goal, ratio) in enumerate(ratios):
        left, right = (ratio.bound, _MOST) if ratio.is_lower_bound else (_LEAST, ratio.bound)
        axes.barh(row, right - left, left=left, color=_ALLOWED, height=0.7)
        color = _REACHED if goal.is_met else _MISSED
        axes.plot(min(max(ratio.value, _LEAST), _MOST), row, "o" if goal.is_met else "X", color=color, markersize=7)
        axes.annotate(goal.value, (_MOST, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)
    title = "All ratios; the reference is 1 ×; a goal allows what is green (✖: not reached)"
    axes.set_title(title, loc="left", fontsize=11)
    labels = [textwrap.shorten(goal.text.replace("`", ""), _LONGEST, placeholder=" …") for goal, _ in ratios]
    axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
    axes.set_xscale("log")
    axes.set_xlim(_LEAST, _MOST)
    ticks = [0.03, 0.1, 0.3, 1, 3, 10, 30]
    axes.set_xticks(ticks, [f"{tick:g} ×" for tick in ticks])
    axes.minorticks_off()
    _finish(axes, len(ratios))


def _finish(axes: Axes, rows: int) -> None:
    axes.set_ylim(rows - 0.4, -0.6)
    axes.axvline(1, color="#444444", linewidth=1, zorder=0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
