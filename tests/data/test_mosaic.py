import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import DataError
from paceline.data.batch import RAGGED, Sample
from paceline.data.transforms.detection import Mosaic


def scene(height: int, width: int, value: int, channels: int = 1, frames: int = 0) -> Sample:
    """One image of one value, with an object that covers all of it and a keypoint in its middle."""
    shape = (*[frames] * (frames > 0), height, width, channels)
    return {
        "image": np.full(shape, value, np.uint8),
        "mask": np.full((height, width), value + 1, np.uint8),
        "boxes": np.array([[0, 0, width, height]], np.float32),
        "classes": np.array([value]),
        "masks": np.ones((1, height, width), np.uint8),
        "keypoints": np.array([[[width / 2, height / 2, 2], [0, 0, 0]]], np.float32),
        "crowd": np.array([False]),
        "area": np.array([height * width], np.float32),
        "size": np.array([height, width]),
        "image_id": value,
    }


def four(*sizes: tuple[int, int]) -> list[Sample]:
    return [scene(*size, value) for value, size in enumerate(sizes, start=1)]


def test_around_the_middle_all_are_whole() -> None:
    """Images of 4 × 8, 8 × 8, 2 × 2 and 8 × 4 on a canvas of 8 × 8: fitted to 2 × 4, 4 × 4, 4 × 4 and 4 × 2."""
    first, *others = four((4, 8), (8, 8), (2, 2), (8, 4))
    result = Mosaic(8, fill=9, mask_fill=77)(first, np.array([0.0, 0.5, 0.5]), others)
    expected = np.array(
        [
            [9, 9, 9, 9, 2, 2, 2, 2],
            [9, 9, 9, 9, 2, 2, 2, 2],
            [1, 1, 1, 1, 2, 2, 2, 2],
            [1, 1, 1, 1, 2, 2, 2, 2],
            [3, 3, 3, 3, 4, 4, 9, 9],
            [3, 3, 3, 3, 4, 4, 9, 9],
            [3, 3, 3, 3, 4, 4, 9, 9],
            [3, 3, 3, 3, 4, 4, 9, 9],
        ]
    )
    assert np.array_equal(result["image"][..., 0], expected)
    assert np.array_equal(result["mask"], np.where(expected == 9, 77, expected + 1))
    assert result["boxes"].tolist() == [[0, 2, 4, 4], [4, 0, 8, 4], [0, 4, 4, 8], [4, 4, 6, 8]]
    assert result["classes"].tolist() == [1, 2, 3, 4]
    assert result["keypoints"][:, 0].tolist() == [[2, 3, 2], [6, 2, 2], [2, 6, 2], [5, 6, 2]]
    assert not result["keypoints"][:, 1].any()
    assert result["area"].tolist() == [8, 16, 16, 8]
    for number, mask in enumerate(result["masks"], start=1):
        assert np.array_equal(mask, expected == number)
    assert result["image_id"] == 1


def test_what_reaches_beyond_the_canvas_is_cut_off() -> None:
    first, *others = four((8, 8), (8, 8), (8, 8), (8, 8))
    result = Mosaic(8, fill=9)(first, np.array([0.0, 0.0, 0.5]), others)  # around row 2, column 4
    expected = np.array([[1] * 4 + [2] * 4] * 2 + [[3] * 4 + [4] * 4] * 4 + [[9] * 8] * 2)
    assert np.array_equal(result["image"][..., 0], expected)
    assert result["boxes"].tolist() == [[0, 0, 4, 2], [4, 0, 8, 2], [0, 2, 4, 6], [4, 2, 8, 6]]
    assert result["area"].tolist() == [8, 8, 16, 16]
    assert result["keypoints"][:, 0].tolist() == [[2, 0, 2], [6, 0, 2], [2, 4, 2], [6, 4, 2]]
    few = Mosaic(8, min_visible=0.6)(first, np.array([0.0, 0.0, 0.5]), others)
    assert few["classes"].tolist() == [3, 4]
    assert all(len(few[name]) == 2 for name in RAGGED)


def test_with_probability_0_the_sample_stays() -> None:
    first, *others = four((4, 8), (8, 8), (2, 2), (8, 4))
    result = Mosaic(8, p=0.5)(first, np.array([0.5, 0.5, 0.5]), others)
    assert all(result[name] is first[name] for name in first)


def test_a_label_is_of_one_image() -> None:
    first, *others = four((4, 8), (8, 8), (2, 2), (8, 4))
    with pytest.raises(DataError, match="a label is of one image"):
        Mosaic(8)({**first, "label": 1}, np.zeros(3), others)


SIDES = st.integers(1, 20)
SHARES = st.floats(0, 1, exclude_max=True)


@settings(max_examples=50, deadline=None)
@given(
    st.tuples(*[st.tuples(SIDES, SIDES)] * 4),
    st.integers(2, 30),
    st.integers(2, 30),
    SHARES,
    SHARES,
    st.sampled_from([1, 3]),
    st.sampled_from([0, 2]),
)
def test_shapes(
    sizes: tuple[tuple[int, int], ...],
    height: int,
    width: int,
    down: float,
    across: float,
    channels: int,
    frames: int,
) -> None:
    samples = [scene(*size, value, channels, frames) for value, size in enumerate(sizes, start=1)]
    before = [{name: np.copy(value) for name, value in sample.items()} for sample in samples]
    result = Mosaic([height, width], min_visible=0.0)(samples[0], np.array([0.0, down, across]), samples[1:])
    assert result["image"].shape == (*[frames] * (frames > 0), height, width, channels)
    assert result["mask"].shape == (height, width)
    count = len(result["boxes"])
    assert all(len(result[name]) == count for name in RAGGED)
    assert result["masks"].shape == (count, height, width)
    assert (result["boxes"] >= 0).all()
    assert (result["boxes"] <= [width, height, width, height]).all()
    for name in samples[0]:
        assert all(np.array_equal(sample[name], copy[name]) for sample, copy in zip(samples, before, strict=True))
