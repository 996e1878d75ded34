"""Curves, as images and as characters."""

from __future__ import annotations

import numpy as np

from paceline.visualize.charts import draw_curves, terminal_curve
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


def test_a_terminal_shows_the_height_of_each_value() -> None:
    assert terminal_curve([0.5, 1, 2], height=2) == ["2 ┤  █", "0 ┤▄██"]
    assert terminal_curve([0, 0], height=1) == ["1 ┤  "]


def test_peaks_of_many_values_stay_visible() -> None:
    values = [0.0] * 1000
    values[503] = 3.0
    lines = terminal_curve(values, width=10, height=1)
    assert lines == ["3 ┤     █    "]
