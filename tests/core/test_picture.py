from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.lettering import cut, drawable, font_of_size, wrap
from paceline.core.picture import Picture, heat_map, image_grid, save_png

GREEN, RED, WHITE, DARKEST = (47, 158, 68), (224, 49, 49), (255, 255, 255), (8, 48, 107)


def plain_image(height: int, width: int, colour: tuple[int, int, int]) -> Picture:
    return np.full((height, width, 3), colour, dtype=np.uint8)


def extent(picture: Picture, colour: tuple[int, int, int]) -> tuple[int, int]:
    """Height and width of the box around all pixels of exactly that colour."""
    rows, columns = np.nonzero((picture == colour).all(axis=2))
    return int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1


def count(picture: Picture, colour: tuple[int, int, int]) -> int:
    return int((picture == colour).all(axis=2).sum())


def test_small_images_are_enlarged_by_whole_factors_with_sharp_pixels() -> None:
    checks = np.zeros((28, 28, 3), dtype=np.uint8)
    checks[::2, ::2], checks[1::2, 1::2] = (1, 2, 3), (1, 2, 3)
    grid = image_grid([checks], [""], [None], columns=1)
    assert extent(grid, (1, 2, 3)) == (84, 84)  # 96 // 28 = 3
    assert count(grid, (1, 2, 3)) == 28 * 28 // 2 * 9


@pytest.mark.parametrize(("height", "width"), [(300, 200), (20, 80), (48, 64), (1, 500)])
def test_aspect_is_kept_within_the_cell(height: int, width: int) -> None:
    grid = image_grid([plain_image(height, width, (10, 20, 30))], ["x"], [None], columns=4)
    shown_height, shown_width = extent(grid, (10, 20, 30))
    assert max(shown_height, shown_width) == 96
    assert shown_height == max(1, round(96 * height / max(height, width)))
    assert shown_width == max(1, round(96 * width / max(height, width)))


def test_marks_frame_the_image() -> None:
    image = plain_image(96, 96, (10, 20, 30))
    grid = image_grid([image] * 3, ["a", "b", "c"], ["good", "bad", None], columns=3)
    ring = 102 * 102 - 96 * 96
    assert (count(grid, GREEN), count(grid, RED)) == (ring, ring)


def test_grid_wraps_after_the_columns_and_has_white_margins() -> None:
    image = plain_image(32, 32, (10, 20, 30))
    one_row = image_grid([image] * 3, ["a"] * 3, [None] * 3, columns=3)
    two_rows = image_grid([image] * 5, ["a"] * 5, [None] * 5, columns=3)
    assert two_rows.shape[1] == one_row.shape[1]
    assert two_rows.shape[0] > 1.8 * one_row.shape[0]
    assert count(two_rows, (10, 20, 30)) == 5 * 96 * 96
    for edge in (two_rows[:10], two_rows[-10:], two_rows[:, :10], two_rows[:, -10:]):
        assert (edge == 255).all()


def test_few_images_need_fewer_columns() -> None:
    image = plain_image(32, 32, (10, 20, 30))
    assert image_grid([image], ["a"], [None], columns=8).shape[1] == 96 + 2 * 16


def test_grey_images_are_taken() -> None:
    grid = image_grid([np.full((32, 32, 1), 7, dtype=np.uint8)], ["a"], [None], columns=1)
    assert count(grid, (7, 7, 7)) >= 96 * 96


def test_heat_map_colours_by_the_share_of_the_row() -> None:
    picture = heat_map(np.array([[50, 0], [2, 2]]), ["cat", "dog"], ["cat", "dog"], "Confusion")
    height, width = extent(picture, DARKEST)
    assert height >= 70  # the cell of cats taken for cats, whole; and the top of the scale, to its right
    left = int(np.nonzero((picture == DARKEST).all(axis=2))[1].min())
    top = int(np.nonzero((picture == DARKEST).all(axis=2))[0].min())
    cell = 72
    corners = [tuple(picture[top + row * cell + 3, left + column * cell + 3]) for row in (0, 1) for column in (0, 1)]
    assert corners[0] == DARKEST
    assert corners[1] == WHITE
    assert corners[2] == corners[3]
    assert corners[2] not in (DARKEST, WHITE)
    assert width > cell


def test_heat_map_of_a_class_without_samples_is_white() -> None:
    picture = heat_map(np.array([[0, 0], [0, 0]]), ["a", "b"], ["a", "b"], "nothing")
    assert count(picture, DARKEST) <= 12  # only the top of the scale


@pytest.mark.parametrize("num_classes", [1, 2, 10, 30, 31, 100, 101, 1000, 1500])
def test_heat_map_keeps_a_sensible_size(num_classes: int) -> None:
    names = [f"class {index} with a very long name that nobody reads to its end" for index in range(num_classes)]
    matrix = np.eye(num_classes, dtype=np.int64) * 12345
    picture = heat_map(matrix, names, names, "Confusion")
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    assert max(picture.shape) < 1700
    for edge in (picture[:8], picture[-8:], picture[:, :8], picture[:, -8:]):
        assert (edge == 255).all()


def test_numbers_are_written_up_to_thirty_classes() -> None:
    def white_on_dark(num_classes: int) -> bool:
        names = [""] * num_classes
        picture = heat_map(np.eye(num_classes, dtype=np.int64) * 8, names, names, "")
        dark_rows, dark_columns = np.nonzero((picture == DARKEST).all(axis=2))
        cell = {30: 32, 31: 13}[num_classes]
        top, left = int(dark_rows.min()), int(dark_columns.min())
        first = picture[top : top + cell, left : left + cell]
        return bool((first != DARKEST).any())

    assert white_on_dark(30)
    assert not white_on_dark(31)


def test_saved_picture_is_read_back_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "pictures" / "a.png"
    for colour in ((1, 2, 3), (200, 100, 0)):
        save_png(plain_image(4, 6, colour), path)
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert np.array_equal(np.asarray(image), plain_image(4, 6, colour))
    assert [entry.name for entry in path.parent.iterdir()] == ["a.png"]


def test_text_is_cut_to_the_room_there_is() -> None:
    font = font_of_size(12)
    assert cut("Bag", font, 100) == "Bag"
    shortened = cut("an unreasonably long class name", font, 80)
    assert shortened.endswith("…")
    assert font.getlength(shortened) <= 80


def test_captions_take_two_lines_at_most() -> None:
    font = font_of_size(12)
    assert wrap("Bag", font, 96) == ["Bag"]
    assert wrap("", font, 96) == []
    assert wrap("Ankle boot, not Pullover", font, 96) == ["Ankle boot, not", "Pullover"]
    lines = wrap("one two three four five six seven eight nine ten eleven twelve", font, 96)
    assert len(lines) == 2
    assert all(font.getlength(line) <= 96 for line in lines)


def test_letters_that_the_font_lacks_are_replaced() -> None:
    assert drawable("café × naïve – 猫…") == "cafe x naive - ?..."
