"""Stacked bars as images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO

import numpy as np

from paceline.visualize.image import Image, to_rgb

_WIDTH, _DPI = 1080, 120
_BAR, _MARGINS = 34, 170  # pixels of a bar with its gap, and of everything above and below
_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")


def draw_stacked_bars(
    labels: Sequence[str], parts: Mapping[str, Sequence[float]], title: str, x_label: str, limit: float | None = None
) -> Image:
    """Draw a bar for each label, made of its parts from left to right; its total is written behind it.

    A dashed line marks the limit, and totals beyond it are red.
    """
    from matplotlib.figure import Figure

    height = _MARGINS + _BAR * len(labels)
    fig = Figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI, layout="constrained")
    axes = fig.subplots()
    places, start = np.arange(len(labels), dtype=np.float64), np.zeros(len(labels))
    for (name, values), color in zip(parts.items(), _COLORS, strict=False):
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
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x_label)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    fig.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    pixels = BytesIO()
    fig.savefig(pixels, format="rgba")
    return to_rgb(np.frombuffer(pixels.getvalue(), np.uint8).reshape(height, _WIDTH, 4))
