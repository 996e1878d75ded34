"""Curves: as a PNG file, and as characters in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

Curve = tuple[Sequence[float], Sequence[float]]
"""x and y values of the same length."""

_BLOCKS = " ▁▂▃▄▅▆▇█"


def save_line_chart(
    curves: Mapping[str, Curve],
    path: Path,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draw curves with a legend into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, (xs, ys) in curves.items():
        axes.plot(xs, ys, label=name, linewidth=1.6)
    axes.set_title(title, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def text_chart(values: Sequence[float], width: int = 72, height: int = 8) -> list[str]:
    """A curve over its own range as lines of block characters, the largest value named at the top, 0 below."""
    columns = _resampled(values, width)
    largest = max(columns) or 1.0
    label_width = max(len(f"{largest:.3g}"), 1)
    lines = []
    for row in range(height - 1, -1, -1):
        levels = (round((value / largest * height - row) * 8) for value in columns)
        bars = "".join(_BLOCKS[min(8, max(0, level))] for level in levels)
        label = f"{largest:.3g}" if row == height - 1 else "0" if row == 0 else ""
        lines.append(f"{label:>{label_width}} ┤{bars}")
    return lines


def _resampled(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values; the largest of each stretch stands for it, so that peaks stay visible."""
    number = min(width, len(values))
    edges = [len(values) * k // number for k in range(number + 1)]
    return [max(values[start:stop]) for start, stop in pairwise(edges)]
