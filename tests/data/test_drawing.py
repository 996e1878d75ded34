"""Pictures of samples, pixel by pixel where it can be said what they are."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.palette import BACKGROUND, colour_of
from paceline.data.batch import JointNames, Sample
from paceline.data.looking.drawing import LEFT, MIDDLE, RIGHT, draw_sample

GREY = np.full((20, 30, 3), 100, np.uint8)
CLASSES = ["cat", "dog", "hat", "cup", "car"]


def where(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the pixels of a colour, the last ones included."""
    rows, columns = np.nonzero(np.all(picture == colour, axis=-1))
    return int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max())


@pytest.mark.parametrize(("side", "shape"), [(60, (40, 60)), (100, (60, 90)), (30, (20, 30)), (15, (10, 15))])
def test_small_images_grow_by_whole_factors(side: int, shape: tuple[int, int]) -> None:
    assert draw_sample({"image": GREY}, side, CLASSES[:3]).shape == (*shape, 3)


def test_boxes_lie_on_the_pixels_they_span() -> None:
    sample: Sample = {
        "image": GREY,
        "boxes": np.array([[3, 4, 10, 9], [12, 2, 30, 20]], np.float32),
        "classes": np.array([1, 4]),
    }
    picture = draw_sample(sample, 60, CLASSES[:5])
    assert where(picture, colour_of(1)) == (6, 8, 19, 17)
    assert where(picture, colour_of(4)) == (24, 4, 59, 39)
    assert tuple(picture[12, 12]) == (100, 100, 100), "nothing inside"


def test_a_background_by_its_name_is_grey() -> None:
    picture = draw_sample({"image": GREY, "mask": np.zeros((20, 30), np.uint8)}, 30, ["Background", "dog"])
    np.testing.assert_allclose(picture[10, 5], 0.45 * 100 + 0.55 * np.array(BACKGROUND), atol=1)


def test_masks_are_tinted_where_something_is_known() -> None:
    mask = np.zeros((20, 30), np.uint8)
    mask[:, 10:20], mask[:, 20:] = 1, 255
    picture = draw_sample({"image": GREY, "mask": mask}, 30, CLASSES[:2])
    for column, number in ((5, 0), (15, 1)):
        expected = 0.45 * 100 + 0.55 * np.array(colour_of(number))
        np.testing.assert_allclose(picture[10, column], expected, atol=1)
    assert tuple(picture[10, 25]) == (100, 100, 100)


def test_a_shape_has_an_outline() -> None:
    shape = np.zeros((20, 30), np.uint8)
    shape[5:15, 10:20] = 1
    for sample in (
        {"image": GREY, "mask": shape * 255},
        {"image": GREY, "masks": shape[None], "classes": np.array([0])},
    ):
        picture = draw_sample(sample, 30, CLASSES[:1])
        assert where(picture, colour_of(0)) == (10, 5, 19, 14)
        np.testing.assert_allclose(picture[10, 15], 45 + 0.55 * np.array(colour_of(0)), atol=1)
        assert tuple(picture[2, 2]) == (100, 100, 100)


def test_joints_have_the_colour_of_their_side() -> None:
    joints = JointNames(["left_hand", "right_hand", "head"], [(0, 1)], [(0, 2), (0, 1)])
    keypoints = np.array([[[5, 5, 2], [25, 5, 1], [15, 15, 0]]], np.float32)
    picture = draw_sample({"image": GREY, "keypoints": keypoints}, 120, CLASSES[:1], joints)
    assert tuple(picture[20, 20]) == LEFT
    assert tuple(picture[20, 97]) == RIGHT, "hidden: only its outline"
    assert tuple(picture[20, 60]) == MIDDLE, "the line between both hands"
    assert tuple(picture[60, 60]) == (100, 100, 100), "not labelled: neither drawn nor joined"


def test_clips_show_four_frames_row_by_row() -> None:
    frames = np.stack([np.full((6, 8, 3), 10 * number, np.uint8) for number in range(8)])
    picture = draw_sample({"image": frames}, 66, CLASSES[:1])
    assert picture.shape == (50, 66, 3)
    assert [int(picture[row, column, 0]) for row in (5, 45) for column in (5, 60)] == [0, 20, 40, 60]
    views = draw_sample({"image": frames.reshape(2, 4, 6, 8, 3)}, 66, CLASSES[:1])
    np.testing.assert_array_equal(views, picture)


def test_a_single_channel_is_grey() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
    np.testing.assert_array_equal(draw_sample({"image": image}, 4, CLASSES[:1]), image.repeat(3, -1))
