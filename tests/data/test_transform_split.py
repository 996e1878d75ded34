import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from support.registered import arguments_of

from paceline.data.batch import Image, Sample
from paceline.data.transforms.base import BatchTransform, OnSamples, SampleTransform, split
from paceline.data.transforms.batch import MixUp, Normalize, RandomErasing
from paceline.data.transforms.geometric import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)

NONE = np.empty(0)
SIDES = st.integers(1, 40)
SHARES = st.floats(0, 1, exclude_max=True)


def resized(size: int | list[int], image: Image) -> Image:
    result: Image = Resize(size)({"image": image}, NONE)["image"]
    return result


def numbered(*shape: int) -> Image:
    return (np.arange(math.prod(shape)) % 256).astype(np.uint8).reshape(shape)


# --- samples ------------------------------------------------------------------------------------------------


def test_shrinking_averages() -> None:
    image = np.array([[0, 4, 100, 100], [8, 12, 100, 100]], np.uint8)[:, :, None]
    # Weights of neighbors fall off linearly over two output pixels: in a row 3/7, 3/7 and 1/7 at its end.
    expected = [(3 * 4 + 3 * 8 + 100) / 7, (8 + 3 * 100 + 3 * 100) / 7]
    np.testing.assert_allclose(resized([1, 2], image)[0, :, 0], expected, atol=1)


def test_growing_interpolates() -> None:
    # Pixel centers at −0.25, 0.25, 0.75 and 1.25 of the old pixels.
    image = np.array([[0, 100]], np.uint8)[:, :, None]
    assert resized([1, 4], image)[:, :, 0].tolist() == [[0, 25, 75, 100]]


@given(SIDES, SIDES, st.integers(1, 40), st.sampled_from([1, 3]))
def test_one_number_is_the_shorter_side(height: int, width: int, size: int, channels: int) -> None:
    result = resized(size, numbered(height, width, channels))
    assert result.dtype == np.uint8
    assert min(result.shape[:2]) == size
    assert result.shape == (height * size // min(height, width), width * size // min(height, width), channels)


@given(SIDES, SIDES, SIDES, SIDES, st.sampled_from([1, 3]))
def test_center_crop_is_the_middle(height: int, width: int, wanted: int, across: int, channels: int) -> None:
    image = numbered(height, width, channels) | 1
    result = CenterCrop([wanted, across])({"image": image}, NONE)["image"]
    assert result.shape == (wanted, across, channels)
    # What is cut off or added differs by at most one between the two sides; nothing is lost but that.
    assert np.count_nonzero(result) == min(height, wanted) * min(width, across) * channels


def test_center_crop_by_hand() -> None:
    image = numbered(4, 5, 1)
    assert CenterCrop(2)({"image": image}, NONE)["image"][:, :, 0].tolist() == [[7, 8], [12, 13]]
    padded = CenterCrop([3, 1])({"image": numbered(1, 1, 1) + 9}, NONE)["image"]
    assert padded[:, :, 0].tolist() == [[0], [9], [0]]


def test_random_resized_crop_by_hand() -> None:
    crop = RandomResizedCrop(size=2, scale=(0.25, 0.25), ratio=(1.0, 1.0))
    assert crop.box(100, 100, np.array([0.3, 0.7, 0.5, 0.0])) == (25, 0, 50, 50)
    assert crop.box(100, 100, np.array([0.3, 0.7, 0.999, 0.999])) == (50, 50, 50, 50)
    image = numbered(4, 4, 1)
    result = crop({"image": image, "label": 3}, np.array([0.0, 0.0, 0.99, 0.0]))
    assert result["image"][:, :, 0].tolist() == [[8, 9], [12, 13]]
    assert result["label"] == 3


@given(st.integers(1, 60), st.integers(1, 60), st.tuples(SHARES, SHARES, SHARES, SHARES))
def test_random_resized_crop_always_fits(height: int, width: int, draws: tuple[float, ...]) -> None:
    crop = RandomResizedCrop(size=[5, 7])
    top, left, rows, columns = crop.box(height, width, np.array(draws))
    assert min(rows, columns) >= 1
    assert 0 <= top <= height - rows
    assert 0 <= left <= width - columns
    image = numbered(height, width, 3)
    assert crop({"image": image}, np.array(draws))["image"].shape == (5, 7, 3)


@given(st.integers(300, 900), st.integers(300, 900), st.tuples(SHARES, SHARES, SHARES, SHARES))
def test_random_resized_crop_keeps_its_ranges(height: int, width: int, draws: tuple[float, ...]) -> None:
    rows, columns = RandomResizedCrop(size=5).box(height, width, np.array(draws))[2:]
    # Rounding to whole pixels moves a side of at least 70 pixels by less than one percent.
    assert 3 / 4 * 0.98 <= columns / rows <= 4 / 3 * 1.02
    assert 0.08 * 0.98 <= rows * columns / (height * width) <= 1


def test_random_resized_crop_draws_the_area_evenly_over_what_fits() -> None:
    # At aspect 1 a part of a 200×100 image covers at most half of it.
    crop = RandomResizedCrop(size=5, scale=(0.1, 1.0), ratio=(1.0, 1.0))
    for draw, share in ((0.0, 0.1), (0.5, 0.3), (1 - 1e-9, 0.5)):
        rows, columns = crop.box(200, 100, np.array([0.5, draw, 0, 0]))[2:]
        assert rows * columns / 20_000 == pytest.approx(share, abs=0.01)


def test_samples_are_not_changed_in_place() -> None:
    image = numbered(9, 8, 3)
    sample: Sample = {"image": image.copy(), "label": 1}
    draws = np.full(4, 0.4)
    for transform in (Resize(4), Resize([8, 8]), CenterCrop(4), RandomResizedCrop(4)):
        assert transform(sample, draws[: transform.draws])["label"] == 1
        assert np.array_equal(sample["image"], image)


# --- recipes ------------------------------------------------------------------------------------------------


FLIP, CROP, NORMALIZE = RandomHorizontalFlip(), RandomCrop(3, padding=1), Normalize([0.5], [0.5])
PLACES: list[tuple[list[SampleTransform | BatchTransform], bool, int]] = [
    ([], False, 0),
    ([Resize(4), CenterCrop(3), FLIP, NORMALIZE], False, 3),
    ([FLIP, NORMALIZE], False, 1),
    ([FLIP, Resize(4), NORMALIZE], False, 2),
    ([CROP, FLIP, NORMALIZE], True, 0),  # in memory
    ([CROP, Resize(4), CROP, FLIP], True, 4),
    ([NORMALIZE, CROP], False, 0),  # after a transform of batches, images have one size
]


@pytest.mark.parametrize(("transforms", "have_one_size", "end"), PLACES)
def test_split_decides_where_transforms_run(
    transforms: list[SampleTransform | BatchTransform], have_one_size: bool, end: int
) -> None:
    samples, batches = split(transforms, have_one_size)
    either = (RandomCrop, RandomHorizontalFlip)
    assert samples == [OnSamples(each) if isinstance(each, either) else each for each in transforms[:end]]
    assert batches == transforms[end:]
    assert not any(hasattr(each, "is_batch") for each in samples)
    drawn = [each.draws for each in samples] + [each.draws for each in batches]
    assert drawn == [each.draws for each in transforms]


def test_split_names_both_transforms_that_are_out_of_order() -> None:
    with pytest.raises(ValueError, match=r"^random_resized_crop must come before mixup: "):
        split([Resize(4), FLIP, MixUp(num_classes=2), RandomResizedCrop(3)])


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        ("transform", "center_crop", {"size": 0}),
        ("transform", "center_crop", {"size": [3]}),
        ("transform", "random_resized_crop", {"size": 3, "scale": [0.5, 0.1]}),
        ("transform", "random_resized_crop", {"size": 3, "scale": [0.0, 1.0]}),
        ("transform", "random_horizontal_flip", {"p": 1.5}),
        ("transform", "random_crop", {"padding": 2}),
        ("transform", "normalize", {"mean": [0.5, 0.5], "std": [0.5]}),
        ("transform", "normalize", {"mean": [0.5], "std": [0.0]}),
        ("dataset", "idx", {"root": "x", "split": "val"}),
        ("dataset", "image_folder", {"root": "x", "extensions": ["jpg"]}),
    ],
)
def test_wrong_arguments_are_refused(kind: str, name: str, values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        arguments_of(kind, name)(**values)


def test_draws_are_as_many_as_a_transform_says() -> None:
    draws: NDArray[np.float64] = np.full(4, 0.5)
    assert Resize(2).draws == CenterCrop(2).draws == Normalize([0], [1]).draws == 0
    assert RandomResizedCrop(2).box(9, 9, draws[: RandomResizedCrop.draws])
    assert not any(hasattr(kind, "is_batch") for kind in (Resize, CenterCrop, RandomResizedCrop))
    assert all(kind.is_batch for kind in (RandomHorizontalFlip, RandomCrop, RandomErasing, Normalize))
