"""Grids of panels: rows, frames, captions, titles and legends."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.visualize.colors import BACKGROUND, CORRECT, WRONG, class_color
from paceline.visualize.grid import LegendEntry, Panel, class_legend, image_grid, tile_frames
from paceline.visualize.image import Image

INK = (10, 20, 30)
MARGIN, CELL = 16, 96


def plain(height: int, width: int) -> Image:
    return np.full((height, width, 3), INK, np.uint8)


def count(image: Image, color: tuple[int, int, int]) -> int:
    return int((image == color).all(axis=2).sum())


def lefts(image: Image) -> list[int]:
    """Where stretches of ink begin in the row of pixels through the first images."""
    is_ink = np.pad((image[MARGIN + 10] == INK).all(1), 1)
    return np.flatnonzero(is_ink[1:-1] & ~is_ink[:-2]).tolist()


def test_images_stand_in_cells_at_their_own_size() -> None:
    page = image_grid([[Panel(plain(96, 64)), Panel(plain(40, 96))]])
    assert count(page, INK) == 96 * 64 + 40 * 96
    assert page.shape[1] == 2 * (CELL + MARGIN) + MARGIN
    assert lefts(image_grid([[Panel(plain(30, 30))] * 3])) == [MARGIN + 33 + k * (CELL + MARGIN) for k in range(3)]


def test_frames_tell_whether_a_prediction_is_correct() -> None:
    image = plain(96, 96)
    page = image_grid([[Panel(image, "a", True), Panel(image, "b", False), Panel(image, "c")]])
    ring = 102 * 102 - 96 * 96
    assert (count(page, CORRECT), count(page, WRONG)) == (ring, ring)


@pytest.mark.parametrize(
    ("samples", "panels", "side", "columns"),
    [(24, 1, 96, 6), (9, 1, 96, 5), (10, 1, 96, 5), (1, 1, 96, 1), (8, 3, 160, 6), (8, 2, 160, 6), (3, 1, 900, 2)],
)
def test_rows_are_even_and_keep_samples_together(samples: int, panels: int, side: int, columns: int) -> None:
    page = image_grid([[Panel(plain(side, side), "x")] * panels] * samples)
    assert page.shape[1] == columns * (side + MARGIN) + MARGIN
    assert count(page, INK) == samples * panels * side * side
    assert len(lefts(page)) == columns


@pytest.mark.parametrize("panels", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [8, 12, 24])
@pytest.mark.parametrize(("height", "width"), [(240, 320), (320, 240), (96, 96), (512, 512), (160, 320)])
def test_pages_have_the_shape_of_a_screen(samples: int, panels: int, height: int, width: int) -> None:
    page = image_grid([[Panel(plain(height, width), "x")] * panels] * samples)
    assert 0.8 < page.shape[1] / page.shape[0] < 3.2


def test_rows_are_as_high_as_their_images() -> None:
    flat, high = Panel(plain(20, 96), "a"), Panel(plain(96, 96), "a")
    heights = [image_grid([[panel]]).shape[0] for panel in (flat, high)]
    assert heights[1] - heights[0] == 76
    rows = image_grid([[flat]] * 2 + [[high]] * 2)
    assert rows.shape[1] == 2 * (96 + MARGIN) + MARGIN
    assert rows.shape[0] == sum(heights) - MARGIN


def test_margins_stay_white() -> None:
    page = image_grid([[Panel(plain(32, 96), "a caption that is much too long " * 3, True)]] * 5, "a title " * 99)
    for edge in (page[:10], page[-10:], page[:, :10], page[:, -10:]):
        assert (edge == 255).all()


def test_a_title_stands_above() -> None:
    panels = [[Panel(plain(96, 96))]]
    without, with_title = image_grid(panels), image_grid(panels, "title")
    added = with_title.shape[0] - without.shape[0]
    assert added > 20
    np.testing.assert_array_equal(with_title[added:], without)
    assert (with_title[:added] < 128).any()


def test_legends_are_joined_in_the_order_of_classes() -> None:
    classes = ["background", "disc", "square", "cup"]
    first, second = class_legend([[2, 0]], classes), class_legend([3, 2, 255], classes)
    assert first == (LegendEntry(0, "background", BACKGROUND), LegendEntry(2, "square", class_color(2)))
    assert [entry[1:] for entry in second][1:] == [("cup", class_color(3)), ("ignored", None)]
    image = plain(96, 96)
    page = image_grid([[Panel(image, legend=second)], [Panel(image, legend=first)]])
    places = [np.nonzero((page == color).all(2)) for color in (BACKGROUND, class_color(2), class_color(3))]
    corners = [(int(rows.min()), int(columns.min())) for rows, columns in places]
    assert corners == sorted(corners)
    assert min(corners)[0] > MARGIN + 96
    assert page.shape[0] > image_grid([[Panel(image, legend=first)]] * 2).shape[0], "a second line"


def test_legends_of_many_classes_take_many_lines() -> None:
    classes = [f"class {index}" for index in range(60)]
    page = image_grid([[Panel(plain(96, 96), legend=class_legend(np.arange(60), classes))]] * 5)
    assert all(count(page, class_color(index)) >= 14 * 14 for index in range(16))


def test_clips_show_four_frames_row_by_row() -> None:
    frames = np.stack([np.full((6, 8, 3), 10 * index, np.uint8) for index in range(8)])
    tiles = tile_frames(frames, 66)
    assert tiles.shape == (50, 66, 3)
    assert [int(tiles[row, column, 0]) for row in (5, 45) for column in (5, 60)] == [0, 20, 40, 60]
    assert tile_frames(frames[:1], 66).shape == (48, 64, 3)
    assert tile_frames(frames[:3], 66).shape == (50, 66, 3)
