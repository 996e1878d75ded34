import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import rectangles

from paceline.core.errors import DataError
from paceline.data.transforms.annotations import (
    CropBox,
    compose_affine,
    flip_boxes,
    flip_keypoints,
    invert_affine,
    select_objects,
    transform_annotations,
    transform_boxes,
    transform_points,
)

NUMBERS = st.floats(-3, 3)


def test_a_window_becomes_an_image() -> None:
    matrix = CropBox(top=10, left=20, height=5, width=4).matrix_to(height=10, width=12)
    assert transform_points(matrix, np.array([[20.0, 10.0], [24.0, 15.0], [22.0, 12.5]])).tolist() == [
        [0, 0],
        [12, 10],
        [6, 5],
    ]


@given(st.lists(NUMBERS, min_size=6, max_size=6), st.lists(NUMBERS, min_size=6, max_size=6), NUMBERS, NUMBERS)
def test_maps_are_composed_and_inverted(first: list[float], second: list[float], x: float, y: float) -> None:
    one, other = (np.reshape(values, (2, 3)) + np.eye(2, 3) * 8 for values in (first, second))
    place = np.array([x, y])
    np.testing.assert_allclose(
        transform_points(compose_affine(other, one), place),
        transform_points(other, transform_points(one, place)),
        atol=1e-9,
    )
    np.testing.assert_allclose(transform_points(invert_affine(one), transform_points(one, place)), place, atol=1e-9)


def test_the_box_of_a_turned_box_surrounds_its_corners() -> None:
    quarter = np.array([[0.0, -1, 10], [1, 0, 0]])  # clockwise: (x, y) to (10 − y, x)
    assert transform_boxes(quarter, np.array([[1, 2, 4, 8]], np.float32)).tolist() == [[2, 1, 8, 4]]
    eighth = np.array([[1.0, -1, 0], [1, 1, 0]]) / np.sqrt(2)
    np.testing.assert_allclose(
        transform_boxes(eighth, np.array([[0, 0, 2, 2]], np.float32)), [[-np.sqrt(2), 0, np.sqrt(2), np.sqrt(8)]]
    )


def test_objects_are_cut_and_removed_by_hand() -> None:
    # Of three 4×4 boxes in a window of 10×10: one inside, one with a quarter left, one with a sixteenth left.
    sample = {
        "boxes": np.array([[1, 1, 5, 5], [8, 8, 12, 12], [9, 9, 13, 13], [-7, 0, -3, 4]], np.float32),
        "classes": np.arange(4),
        "area": np.full(4, 16, np.float32),
    }
    kept = transform_annotations(sample, np.eye(2, 3), (10, 10), min_visible=0.25)
    assert kept["boxes"].tolist() == [[1, 1, 5, 5], [8, 8, 10, 10]]
    assert kept["classes"].tolist() == [0, 1]
    assert kept["area"].tolist() == [16, 4]
    assert transform_annotations(sample, np.eye(2, 3), (10, 10), min_visible=0.0)["classes"].tolist() == [0, 1, 2]
    assert transform_annotations(sample, np.eye(2, 3), (10, 10))["classes"].tolist() == [0, 1, 2, 3]


def test_masks_say_better_than_boxes_what_is_left() -> None:
    # An L along the left and the lower border of its box; the window shows the right upper part of the box.
    mask = np.zeros((1, 8, 8), np.uint8)
    mask[0, :, 0] = mask[0, 7] = 1
    sample = {"boxes": np.array([[0, 0, 8, 8]], np.float32), "masks": mask}
    matrix = CropBox(0, 1, 7, 7).matrix_to(7, 7)
    assert len(transform_annotations(sample, matrix, (7, 7), mask[:, :7, 1:], min_visible=0.0)["boxes"]) == 0
    mask[:] = 0  # of an object too small to have any: its box has to say
    assert len(transform_annotations(sample, matrix, (7, 7), mask[:, :7, 1:], min_visible=0.5)["boxes"]) == 1
    without = transform_annotations({"boxes": sample["boxes"]}, matrix, (7, 7), min_visible=0.5)
    assert without["boxes"].tolist() == [[0, 0, 7, 7]]


def test_a_box_without_area_stays_where_it_is_seen() -> None:
    sample = {"boxes": np.array([[3, 3, 3, 5], [30, 3, 30, 5]], np.float32)}
    assert transform_annotations(sample, np.eye(2, 3), (10, 10), min_visible=0.5)["boxes"].tolist() == [[3, 3, 3, 5]]


def test_keypoints_beyond_the_border_are_not_labelled() -> None:
    keypoints = np.array([[[1, 1, 2], [9.5, 3, 1], [10, 3, 2], [-0.5, 3, 2], [0, 0, 0]]], np.float32)
    moved = transform_annotations({"keypoints": keypoints}, np.eye(2, 3), (10, 10), min_visible=0.0)["keypoints"]
    assert moved.tolist() == [[[1, 1, 2], [9.5, 3, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]]
    shifted = transform_annotations({"keypoints": keypoints}, np.array([[1.0, 0, 2], [0, 1, 2]]), (99, 99))["keypoints"]
    assert shifted[0, 4].tolist() == [0, 0, 0]


def test_the_way_back_follows() -> None:
    matrix = CropBox(10, 20, 50, 50).matrix_to(25, 25)
    sample = transform_annotations({"matrix": np.eye(2, 3, dtype=np.float32)}, matrix, (25, 25))
    assert sample["matrix"].dtype == np.float32
    assert transform_points(sample["matrix"], np.array([0.0, 0.0])).tolist() == [20, 10]
    twice = transform_annotations(sample, CropBox(5, 0, 20, 25).matrix_to(20, 25), (20, 25))
    assert transform_points(twice["matrix"], np.array([1.0, 0.0])).tolist() == [22, 20]


def test_chosen_objects_take_all_their_fields_along() -> None:
    sample = rectangles(9, 9, [(0, 0, 3, 3), (4, 4, 8, 9)])
    chosen = select_objects(sample, np.array([False, True]))
    assert chosen["classes"].tolist() == [1]
    assert all(len(chosen[name]) == 1 for name in ("boxes", "masks", "keypoints", "crowd", "area"))
    assert chosen["image"] is sample["image"]
    assert chosen["label"] == 3


def test_mirroring_exchanges_pairs() -> None:
    boxes = np.array([[1, 2, 4, 8]], np.float32)
    keypoints = np.array([[[1, 5, 2], [7, 6, 1], [0, 0, 0], [3, 3, 2]]], np.float32)
    expected = [[[3, 6, 1], [9, 5, 2], [0, 0, 0], [7, 3, 2]]]
    assert flip_boxes(boxes, 10).tolist() == [[6, 2, 9, 8]]
    assert flip_keypoints(keypoints, 10, [(0, 1)]).tolist() == expected
    assert boxes.tolist() == [[1, 2, 4, 8]]
    assert keypoints[0, 0].tolist() == [1, 5, 2]
    assert flip_keypoints(keypoints[:0], 10, [(0, 1)]).shape == (0, 4, 3)


def test_a_pair_that_does_not_exist_is_named() -> None:
    with pytest.raises(DataError, match="the pair 2, 4 is beyond the 4 keypoints"):
        flip_keypoints(np.zeros((1, 4, 3), np.float32), 10, [(0, 1), (2, 4)])
