"""Masks, boxes and keypoints, pixel by pixel where it can be said what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.visualize.colors import CENTER, LEFT, RIGHT, class_color
from paceline.visualize.image import Image
from paceline.visualize.overlay import draw_boxes, draw_keypoints, draw_label_map, draw_mask

GRAY = (100, 100, 100)
COLORS = [class_color(index) for index in range(5)]


def plain(height: int = 20, width: int = 30) -> Image:
    return np.full((height, width, 3), 100, np.uint8)


def blended(color: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(round(0.45 * 100 + 0.55 * value) for value in color)


def where(image: Image, color: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the pixels of a color, the last ones included."""
    rows, columns = np.nonzero(np.all(image == color, axis=-1))
    return int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max())


def test_boxes_lie_on_the_pixels_they_span() -> None:
    boxes = 2 * np.array([[3, 4, 10, 9], [12, 2, 30, 20]], np.float32)
    image = draw_boxes(plain(40, 60), boxes, [COLORS[1], COLORS[4]], [1, 2])
    assert where(image, COLORS[1]) == (6, 8, 19, 17)
    assert where(image, COLORS[4]) == (24, 4, 59, 39)
    assert tuple(image[9, 7]) == GRAY, "nothing inside of a line of one pixel"
    assert tuple(image[5, 25]) == COLORS[4], "a line of two pixels"
    assert (draw_boxes(plain(), np.empty((0, 4)), []) == plain()).all()


def test_labels_stand_on_their_color_above_boxes_and_inside_where_no_room_is() -> None:
    boxes = np.array([[50, 40, 90, 70], [50, 100, 90, 130], [170, 0, 199, 30]], np.float32)
    image = draw_boxes(plain(140, 200), boxes, COLORS[:3], labels=["first", "", "a name"])
    plainly = draw_boxes(plain(140, 200), boxes, COLORS[:3])
    rows, columns = np.nonzero((image != plainly).any(2))
    assert (rows.min(), columns.max()) == (0, 199), "at the rim"
    left, top, right, bottom = where(image, COLORS[0])
    assert (left, right, bottom) == (50, 89, 69)
    assert 25 <= top < 40
    assert where(image, COLORS[1]) == (50, 100, 89, 129), "no label"
    assert (image.min(2) > 200).sum() > 10, "ink"


def test_the_first_box_and_its_label_lie_on_top() -> None:
    boxes = np.array([[20, 40, 80, 70], [20, 40, 80, 70]], np.float32)
    image = draw_boxes(plain(100, 100), boxes, COLORS[:2], labels=["one", "one"])
    assert not (image == COLORS[1]).all(2).any()


def test_lines_and_labels_grow_with_large_images() -> None:
    boxes = np.array([[400, 400, 1200, 1200]], np.float32)
    image = draw_boxes(plain(1600, 1600), boxes, COLORS[:1], labels=["name"])
    assert 400 - where(image, COLORS[0])[1] > 20
    assert (image[1000, 400:410] == COLORS[0]).all(1).sum() == 4


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64])
def test_label_maps_are_blended_where_a_class_is_known(dtype: type) -> None:
    label_map: NDArray[Any] = np.zeros((20, 30), dtype)
    label_map[:, 10:20], label_map[:, 20:] = 1, 255 if dtype is np.uint8 else 300
    image = draw_label_map(plain(), label_map, COLORS[:2])
    assert [tuple(image[10, column]) for column in (5, 15, 25)] == [blended(COLORS[0]), blended(COLORS[1]), GRAY]


def test_label_maps_of_other_sizes_keep_their_ids() -> None:
    label_map = np.array([[0, 4], [4, 0]])
    image = draw_label_map(plain(), label_map, COLORS)
    assert {tuple(pixel) for pixel in image.reshape(-1, 3)} == {blended(COLORS[0]), blended(COLORS[4])}
    assert tuple(image[9, 14]) == tuple(image[10, 15]) == blended(COLORS[0])
    assert tuple(image[9, 15]) == tuple(image[10, 14]) == blended(COLORS[4])


@pytest.mark.parametrize("scale", [1, 2])
def test_a_mask_has_an_outline(scale: int) -> None:
    mask = np.zeros((20, 30))
    mask[5:15, 10:20] = 1
    image = draw_mask(plain(20 * scale, 30 * scale), mask, COLORS[0])
    assert where(image, COLORS[0]) == (10 * scale, 5 * scale, 20 * scale - 1, 15 * scale - 1)
    outline = 2 * (10 + 10) * scale - 4
    assert int((image == COLORS[0]).all(2).sum()) == outline
    assert tuple(image[10 * scale, 15 * scale]) == blended(COLORS[0])
    assert tuple(image[2, 2]) == GRAY


def test_a_mask_is_outlined_at_the_rim_of_the_image() -> None:
    image = draw_mask(plain(), np.ones((20, 30)), COLORS[0])
    assert int((image == COLORS[0]).all(2).sum()) == 2 * (20 + 30) - 4


def test_shades_of_a_mask_are_shades_of_its_color() -> None:
    mask: NDArray[np.float64] = np.full((20, 30), 0.4)
    expected = [round(100 * 0.78 + 0.22 * value) for value in COLORS[2]]
    assert (draw_mask(plain(), mask, COLORS[2]) == expected).all(), "and none of it is inside of an outline"


def test_keypoints_have_the_color_of_their_side() -> None:
    keypoints = np.array([[[20, 20, 2], [100, 20, 1], [60, 60, 0]]], np.float32)
    skeleton = [(0, 2), (0, 1)]
    image = draw_keypoints(plain(80, 120), keypoints, ["left_hand", "right_hand", "head"], skeleton)
    assert tuple(image[20, 20]) == LEFT
    assert tuple(image[20, 97]) == RIGHT, "hidden: only its outline"
    assert tuple(image[20, 60]) == CENTER, "the line between both hands"
    assert tuple(image[60, 60]) == GRAY, "not labeled: neither drawn nor joined"
    unnamed = draw_keypoints(plain(80, 120), keypoints)
    assert tuple(unnamed[20, 20]) == CENTER
    assert tuple(unnamed[20, 60]) == GRAY
