"""Curves as images, and as text in a terminal."""

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
_BLOCKS = " ▁▂▃▄▅▆▇█"


def draw_curves(
    curves: Mapping[str, Curve],
    title: str,
    x_label: str,
    y_label: str,
    colors: Mapping[str, Color] | None = None,
) -> Image:
    """Plot curves on common axes, with a legend if there are several; beside those in `colors`, the others are dark."""
    fig, axes = _new_axes(*_CURVES_SIZE, title)
    for name, (xs, ys) in curves.items():
        style = {} if colors is None else _style(colors.get(name))
        axes.plot(xs, ys, label=name, **{"linewidth": 1.6} | style)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.25)
    if len(curves) > 1:
        axes.legend(frameon=False)
    return _pixels(fig)


def _style(color: Color | None) -> dict[str, Any]:
    dark = {"color": [value / 255 for value in TEXT], "linewidth": 3.2}
    return dark if color is None else {"color": [value / 255 for value in color]}


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
