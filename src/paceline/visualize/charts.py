"""Curves and stacked bars as images, and curves as text in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.visualize.colors import TEXT, Color
from paceline.visualize.image import Image, to_rgb

Curve = tuple[Sequence[float], Sequence[float]]
"""x and y values of the same length."""

_DPI = 120
_CURVES_SIZE = (960, 540)
_BARS_WIDTH = 1080
_BAR, _MARGINS = 34, 170  # pixels of a bar with its gap, and of everything above and below
_BAR_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")
_BLOCKS = " ▁▂▃▄▅▆▇█"


def draw_curves(
    curves: Mapping[str, Curve],
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    colors: Mapping[str, Color] | None = None,
) -> Image:
    """Plot curves on common axes, with a legend if there are several; beside those in `colors`, the others are dark."""
    fig, axes = _new_axes(*_CURVES_SIZE, title)
    for name, (xs, ys) in curves.items():
        style = {} if colors is None else _style(colors.get(name))
        axes.plot(xs, ys, label=name, **{"linewidth": 1.6} | style)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")
    axes.grid(alpha=0.25)
    if len(curves) > 1:
        axes.legend(frameon=False)
    return _pixels(fig)


def _style(color: Color | None) -> dict[str, Any]:
    dark = {"color": [value / 255 for value in TEXT], "linewidth": 3.2}
    return dark if color is None else {"color": [value / 255 for value in color]}


def draw_stacked_bars(
    labels: Sequence[str], parts: Mapping[str, Sequence[float]], title: str, x_label: str, limit: float | None = None
) -> Image:
    """Draw a bar for each label, made of its parts from left to right; its total is written behind it.

    A dashed line marks the limit, and totals beyond it are red.
    """
    fig, axes = _new_axes(_BARS_WIDTH, _MARGINS + _BAR * len(labels), title)
    places, start = np.arange(len(labels), dtype=np.float64), np.zeros(len(labels))
    for (name, values), color in zip(parts.items(), _BAR_COLORS, strict=False):
        axes.barh(places, values, left=start, height=0.7, label=name, color=color)
        start += np.asarray(values)
    most = max(float(start.max(initial=0.0)), limit if limit is not None and limit < 2.5 * start.max() else 0.0)
    for place, total in zip(places, start, strict=True):
        color = "#cc3311" if limit is not None and total > limit else "#333333"
        # Above the line of the limit, which may run through it.
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(
            total + 0.008 * most, place, f"{total:,.4g}", va="center", fontsize=8, color=color, bbox=box, zorder=4
        )
    if limit is not None and limit <= most:
        axes.axvline(limit, color="#cc3311", linestyle="--", linewidth=1.4, label=f"limit: {limit:,.4g}")
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * most or 1.0)
    axes.set_xlabel(x_label)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    fig.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return _pixels(fig)


def _new_axes(width: int, height: int, title: str) -> tuple[Any, Any]:
    """A matplotlib canvas of this size in pixels, and its axes."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, layout="constrained")
    axes = fig.subplots()
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return fig, axes


def _pixels(fig: Any) -> Image:
    content = BytesIO()
    fig.savefig(content, format="rgba")
    width, height = (round(side * _DPI) for side in fig.get_size_inches())
    return to_rgb(np.frombuffer(content.getvalue(), np.uint8).reshape(height, width, 4))


def terminal_curve(values: Sequence[float], width: int = 72, height: int = 8) -> list[str]:
    """Plot values as lines of block characters, with the largest value at the top left and 0 at the bottom."""
    columns = _downsample(values, width)
    largest = max(columns) or 1.0
    top = f"{largest:.3g}"
    lines = []
    for row in range(height - 1, -1, -1):
        levels = (round((value / largest * height - row) * 8) for value in columns)
        bars = "".join(_BLOCKS[min(8, max(0, level))] for level in levels)
        label = top if row == height - 1 else "0" if row == 0 else ""
        lines.append(f"{label:>{len(top)}} ┤{bars}")
    return lines


def _downsample(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values: the maximum of each bin, so that peaks stay visible."""
    number = min(width, len(values))
    edges = [len(values) * k // number for k in range(number + 1)]
    return [max(values[start:stop]) for start, stop in pairwise(edges)]
