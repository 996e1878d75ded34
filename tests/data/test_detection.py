from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.datasets.detection import BadBoxes, CheckedBoxes, Problems, at_most, check_boxes

HEIGHT, WIDTH = 30, 40
BOXES = np.array(
    [
        [0, 0, 40, 30],  # the whole image
        [-3, 5, 10, 31],  # partly outside
        [40, 0, 50, 10],  # beside it
        [5, 5, 5, 9],  # empty
        [9, 5, 5, 9],  # inverted
        [1, 1, 40.005, 2],  # over the border by rounding
        [-9, -9, 99, 99],  # around it
    ],
    np.float64,
)


def check(boxes: NDArray[np.float64], policy: BadBoxes) -> CheckedBoxes:
    sizes = np.tile(np.array([HEIGHT, WIDTH], np.int64), (len(boxes), 1))
    return check_boxes(boxes, sizes, policy, lambda box: f"file: object {box + 1}")


def test_clip_cuts_what_is_partly_outside_and_leaves_out_the_rest() -> None:
    boxes, kept, notes = check(BOXES, "clip")
    assert kept.tolist() == [True, True, False, False, False, True, True]
    assert boxes.tolist() == [[0, 0, 40, 30], [0, 5, 10, 30], [1, 1, 40, 2], [0, 0, 40, 30]]
    assert boxes.dtype == np.float32
    assert notes == [
        "5 of 7 boxes are bad: 2 partly outside its image, 1 outside its image, 1 empty, 1 inverted",
        "file: object 2: partly outside its image, clipped",
        "file: object 3: outside its image, left out",
        "file: object 4: empty, left out",
        "file: object 5: inverted, left out",
        "file: object 7: partly outside its image, clipped",
    ]


def test_drop_leaves_out_all_that_is_bad() -> None:
    boxes, kept, notes = check(BOXES, "drop")
    assert kept.tolist() == [True, False, False, False, False, True, False]
    assert boxes.tolist() == [[0, 0, 40, 30], [1, 1, 40, 2]]
    assert notes[1] == "file: object 2: partly outside its image, left out"


def test_stop_names_each_and_what_to_do() -> None:
    with pytest.raises(DataError) as caught:
        check(BOXES, "stop")
    message = str(caught.value)
    assert message.startswith("5 of 7 boxes are bad")
    assert "file: object 4: empty; " in message
    assert message.endswith("set `bad_boxes: clip` or `bad_boxes: drop`")


@pytest.mark.parametrize("policy", ["stop", "drop", "clip"])
def test_sound_boxes_pass(policy: BadBoxes) -> None:
    boxes, kept, notes = check(BOXES[:1], policy)
    assert (boxes.tolist(), kept.tolist(), notes) == ([[0, 0, 40, 30]], [True], [])
    assert check(BOXES[:0], policy).boxes.shape == (0, 4)


numbers = st.floats(allow_nan=False, allow_infinity=False) | st.floats(-50, 90)


@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=6), st.sampled_from(["drop", "clip"]))
def test_what_is_kept_lies_in_its_image_and_has_an_extent(boxes: list[tuple[float, ...]], policy: BadBoxes) -> None:
    with np.errstate(over="ignore"):  # of the extents of huge boxes, computed here
        checked = check(np.array(boxes, np.float64).reshape(-1, 4), policy)
    assert checked.kept.sum() == len(checked.boxes)
    assert (checked.boxes[:, 2:] > checked.boxes[:, :2]).all()
    assert (checked.boxes >= 0).all()
    assert (checked.boxes <= [WIDTH, HEIGHT, WIDTH, HEIGHT]).all()
    assert bool(checked.notes) >= (not checked.kept.all())


def test_long_lists_are_cut() -> None:
    assert at_most(["a", "b"], 2, 2) == ["a", "b"]
    assert at_most(["a", "b", "c", "d"], 4, 2) == ["a", "b", "and 2 more"]


def test_equal_problems_are_reported_together() -> None:
    problems = Problems(Path("a.json"))
    problems.refuse()
    for number in range(1, 9):
        problems.add("annotation has no 'id'", f"number {number}")
    problems.add("image has no 'width'", "7")
    with pytest.raises(DataError) as caught:
        problems.refuse("repair it")
    assert str(caught.value) == (
        "a.json: 9 problems; annotation has no 'id': number 1, number 2, number 3, number 4, number 5 and 3 more;"
        " image has no 'width': 7; repair it"
    )
