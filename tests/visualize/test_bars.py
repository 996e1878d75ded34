"""Stacked bars: the limit leaves the totals readable."""

import numpy as np

from paceline.visualize.bars import draw_stacked_bars


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
