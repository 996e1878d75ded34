"""Curves, as images and as characters, and stacked bars."""

from __future__ import annotations

import numpy as np

from paceline.visualize.charts import draw_curves, draw_stacked_bars, terminal_curve
from paceline.visualize.colors import TEXT, class_color


def test_each_curve_has_a_color_and_its_place() -> None:
    image = draw_curves({"low": ([0, 10], [1, 1]), "high": ([0, 10], [9, 9])}, "title", "x", "y")
    assert image.shape == (540, 960, 3)
    assert image.dtype == np.uint8
    rows = [np.nonzero((image[:, 480] == color).all(1))[0] for color in ((31, 119, 180), (255, 127, 14))]
    assert rows[0].min() > 540 * 0.7
    assert rows[1].max() < 540 * 0.3


def test_curves_of_classes_have_their_colors_and_others_are_dark_and_thick() -> None:
    curves = {name: ([0, 10], [height, height]) for name, height in (("mean", 1), ("cat", 9))}
    image = draw_curves(curves, "", "x", "y", colors={"cat": class_color(0)})
    rows = [np.nonzero((image[:, 480] == color).all(1))[0] for color in (TEXT, class_color(0))]
    assert (rows[0].min() > 540 * 0.7, rows[1].max() < 540 * 0.3) == (True, True)
    assert len(rows[0]) > len(rows[1])


def test_axes_can_be_logarithmic() -> None:
    curve = {"loss": ([1e-5, 1e-3, 1e-1], [1.0, 2.0, 3.0])}
    marks = []
    for log_x in (False, True):
        image = draw_curves(curve, "", "lr", "loss", log_x=log_x)
        marks.append(np.nonzero((image == (31, 119, 180)).all(2).any(0))[0].mean())
    assert marks[1] > 480 * 0.9, "evenly spread where the axis is logarithmic"
    assert draw_curves(curve, "", "lr", "loss", log_y=True).shape == image.shape


def test_a_terminal_shows_the_height_of_each_value() -> None:
    assert terminal_curve([0.5, 1, 2], height=2) == ["2 ┤  █", "0 ┤▄██"]
    assert terminal_curve([0, 0], height=1) == ["1 ┤  "]


def test_peaks_of_many_values_stay_visible() -> None:
    values = [0.0] * 1000
    values[503] = 3.0
    lines = terminal_curve(values, width=10, height=1)
    assert lines == ["3 ┤     █    "]


def longest_gap(limit: float) -> int:
    """The most pixels in a row that the line of the limit does not cover, of a bar whose total is 1.45."""
    image = draw_stacked_bars(["only"], {"activations": [1.45]}, "title", "GiB", limit).astype(int)
    is_red = np.abs(image - (0xCC, 0x33, 0x11)).sum(axis=2) < 30
    line = is_red[:, is_red[: len(image) // 2].sum(axis=0).argmax()]
    (places,) = np.nonzero(line)
    return int(np.diff(places).max())


def test_the_line_of_the_limit_is_behind_a_total_that_it_runs_through() -> None:
    apart, through = longest_gap(1.0), longest_gap(1.47)
    assert through > apart + 4  # more than between two dashes
