import copy
import inspect
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

import paceline.data.catalogue as catalogue
from paceline.core.arguments import Arguments
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import Sample
from paceline.data.batch_transforms import Flip, Normalize, RandomCrop, RandomErasing
from paceline.data.sample_transforms import CenterCrop, Image, RandomResizedCrop, Resize
from paceline.data.transforms import BatchTransform, SampleTransform, split

NONE = np.empty(0)
SIDES = st.integers(1, 40)
SHARES = st.floats(0, 1, exclude_max=True)


def resized(size: int | list[int], image: Image) -> Image:
    result: Image = Resize(size)({"image": image}, NONE)["image"]
    return result


def numbered(*shape: int) -> Image:
    return (np.arange(math.prod(shape)) % 256).astype(np.uint8).reshape(shape)


def batch(*shape: int) -> Tensor:
    return torch.from_numpy(numbered(*shape))


def uniform(count: int, draws: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((count, draws)))


# --- samples ------------------------------------------------------------------------------------------------


def test_shrinking_averages() -> None:
    image = np.array([[0, 4, 100, 100], [8, 12, 100, 100]], np.uint8)[:, :, None]
    assert resized([1, 2], image)[:, :, 0].tolist() == [[6, 100]]


def test_growing_interpolates() -> None:
    # Pixel centres at −0.25, 0.25, 0.75 and 1.25 of the old pixels.
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
    assert CenterCrop(2)({"image": image}, NONE)["image"][:, :, 0].tolist() == [[6, 7], [11, 12]]
    padded = CenterCrop([3, 1])({"image": numbered(1, 1, 1) + 9}, NONE)["image"]
    assert padded[:, :, 0].tolist() == [[0], [9], [0]]


def test_random_resized_crop_by_hand() -> None:
    crop = RandomResizedCrop(size=2, area=(0.25, 0.25), aspect=(1.0, 1.0))
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
    crop = RandomResizedCrop(size=5, area=(0.1, 1.0), aspect=(1.0, 1.0))
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


# --- batches ------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["plain", "deterministic"])
def _determinism(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("_determinism")
def test_flip_by_hand() -> None:
    images = batch(3, 1, 1, 3)
    draws = torch.tensor([[0.499], [0.5], [0.0]], dtype=torch.float64)
    assert Flip(0.5)(images, draws).flatten(1).tolist() == [[2, 1, 0], [3, 4, 5], [8, 7, 6]]
    assert torch.equal(Flip(0.0)(images, draws), images)
    assert torch.equal(Flip(1.0)(images, draws), images.flip(-1))


@pytest.mark.usefixtures("_determinism")
def test_random_crop_by_hand() -> None:
    images = batch(3, 1, 2, 2) + 1  # 1 2 / 3 4, then 5 6 / 7 8, then 9 10 / 11 12
    draws = torch.tensor([[0.0, 0.0], [0.5, 0.5], [0.99, 0.34]], dtype=torch.float64)
    assert RandomCrop(1)(images, draws).tolist() == [
        [[[0, 0], [0, 1]]],  # moved down and right
        [[[5, 6], [7, 8]]],
        [[[11, 12], [0, 0]]],  # moved up
    ]


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    st.integers(0, 5),
    st.integers(0, 99),
)
def test_random_crop_equals_cropping_one_by_one(shape: tuple[int, int, int, int], padding: int, seed: int) -> None:
    images, draws = batch(*shape), uniform(shape[0], 2, seed)
    expected = torch.zeros_like(images)
    for i, (down, right) in enumerate((draws.numpy() * (2 * padding + 1)).astype(int)):
        plane = np.pad(images[i].numpy(), ((0, 0), (padding, padding), (padding, padding)))
        expected[i] = torch.from_numpy(plane[:, down : down + shape[2], right : right + shape[3]].copy())
    assert torch.equal(RandomCrop(padding)(images, draws), expected)
    assert torch.equal(RandomCrop(padding)(images.float(), draws), expected.float())
    if shape[1] > 1:
        strided = images.contiguous(memory_format=torch.channels_last)
        assert torch.equal(RandomCrop(padding)(strided, draws), expected)


def test_random_erasing_by_hand() -> None:
    # A quarter of 4×8 at aspect 0.5 (height / width): sqrt(8 · 0.5) = 2 rows and sqrt(8 / 0.5) = 4 columns.
    erase = RandomErasing(chance=0.5, area=(0.25, 0.25), aspect=(0.5, 0.5), value=7)
    images = torch.ones(2, 2, 4, 8, dtype=torch.uint8)
    draws = torch.tensor([[0.49, 0, 0, 0.99, 0.2], [0.5, 0, 0, 0, 0]], dtype=torch.float64)
    result = erase(images, draws)
    expected = images.clone()
    expected[0, :, 2:4, 1:5] = 7  # row int(0.99 · 3), column int(0.2 · 5)
    assert torch.equal(result, expected)


@pytest.mark.usefixtures("_determinism")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_random_erasing_equals_erasing_one_by_one(dtype: torch.dtype, value: float) -> None:
    erase = RandomErasing(chance=0.6, value=value)
    images, draws = (batch(40, 3, 13, 9) + 1).to(dtype), uniform(40, 5)
    expected = images.clone()
    hidden = 0
    for i, (chance, area, aspect, top, left) in enumerate(draws.tolist()):
        pixels = (0.02 + 0.31 * area) * 13 * 9
        shape = math.exp(math.log(0.3) + math.log(3.3 / 0.3) * aspect)
        rows, columns = (max(1, round(math.sqrt(side))) for side in (pixels * shape, pixels / shape))
        rows, columns = min(rows, 13), min(columns, 9)
        if chance < 0.6:
            start, across = int(top * (13 - rows + 1)), int(left * (9 - columns + 1))
            expected[i, :, start : start + rows, across : across + columns] = value
            hidden += 1
    assert 10 < hidden < 40
    assert torch.equal(erase(images, draws), expected)


def test_erasing_value_stays_within_whole_pixels() -> None:
    images = torch.ones(1, 1, 2, 2, dtype=torch.uint8)
    draws = torch.zeros(1, 5, dtype=torch.float64)
    bright = RandomErasing(1.0, area=(1.0, 1.0), aspect=(1.0, 1.0), value=300)
    dark = RandomErasing(1.0, area=(1.0, 1.0), aspect=(1.0, 1.0), value=-2)
    assert bright(images, draws).flatten().tolist() == [255] * 4
    assert dark(images, draws).flatten().tolist() == [0] * 4
    assert dark(images.float(), draws).flatten().tolist() == [-2] * 4


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_normalize_equals_its_formula(dtype: torch.dtype) -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    images = batch(5, 3, 7, 8).to(dtype)
    expected = (images.numpy().astype(np.float64) / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    before = images.clone()
    result = Normalize(mean, std)(images, torch.empty(5, 0))
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=1e-6)
    assert torch.equal(images, before)


def test_one_mean_serves_all_channels() -> None:
    images, draws = batch(2, 3, 4, 5), torch.empty(2, 0)
    assert torch.equal(Normalize([0.2861], [0.353])(images, draws), Normalize([0.2861] * 3, [0.353] * 3)(images, draws))


def test_normalize_names_both_numbers_of_channels() -> None:
    with pytest.raises(DataError, match="2 means but the images have 3 channels"):
        Normalize([0.5, 0.5], [1, 1])(batch(1, 3, 2, 2), torch.empty(1, 0))


BATCH_TRANSFORMS = [Flip(), RandomCrop(2), RandomErasing(0.7), Normalize([0.4], [0.3])]


@pytest.mark.usefixtures("_determinism")
@pytest.mark.parametrize("transform", BATCH_TRANSFORMS, ids=lambda transform: type(transform).__name__)
def test_a_sample_does_not_depend_on_its_batch(transform: BatchTransform) -> None:
    images, draws = batch(17, 3, 8, 6), uniform(17, transform.draws)
    before = images.clone()
    together = transform(images, draws)
    assert torch.equal(together, transform(images, draws))
    alone = torch.cat([transform(images[i : i + 1], draws[i : i + 1]) for i in range(17)])
    assert torch.equal(together, alone)
    assert torch.equal(images, before)
    assert torch.equal(copy.deepcopy(transform)(images, draws), together)


# --- recipes ------------------------------------------------------------------------------------------------


def test_split_keeps_the_order_of_each_kind() -> None:
    given: list[SampleTransform | BatchTransform] = [Resize(4), CenterCrop(3), Flip(), RandomCrop(1)]
    assert split(given) == ([Resize(4), CenterCrop(3)], [Flip(), RandomCrop(1)])
    assert split([]) == ([], [])


def test_split_names_both_transforms_that_are_out_of_order() -> None:
    with pytest.raises(ValueError, match=r"^random_resized_crop must come before flip: "):
        split([Resize(4), Flip(), RandomCrop(1), RandomResizedCrop(3)])


@pytest.mark.parametrize("kind", ["dataset", "transform"])
def test_each_name_takes_the_arguments_it_lists(kind: str) -> None:
    for entry in register.kind(kind):
        if not str(entry.target).startswith("paceline.data."):
            continue
        parameters = inspect.signature(entry.resolve()).parameters
        assert list(entry.arguments.model_fields) == list(parameters)
        for name, field in entry.arguments.model_fields.items():
            required = parameters[name].default is inspect.Parameter.empty
            assert field.is_required() == required
            if not required:
                default = parameters[name].default
                assert field.default == (list(default) if isinstance(default, tuple) else default)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (catalogue.SizeArguments, {"size": 0}),
        (catalogue.SizeArguments, {"size": [3]}),
        (catalogue.RandomResizedCropArguments, {"size": 3, "area": [0.5, 0.1]}),
        (catalogue.RandomResizedCropArguments, {"size": 3, "area": [0.0, 1.0]}),
        (catalogue.FlipArguments, {"chance": 1.5}),
        (catalogue.NormalizeArguments, {"mean": [0.5, 0.5], "std": [0.5]}),
        (catalogue.NormalizeArguments, {"mean": [0.5], "std": [0.0]}),
        (catalogue.IdxArguments, {"root": "x", "split": "val"}),
        (catalogue.ImageFolderArguments, {"root": "x", "extensions": ["jpg"]}),
    ],
)
def test_wrong_arguments_are_refused(arguments: type[Arguments], values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        arguments(**values)


def test_draws_are_as_many_as_a_transform_says() -> None:
    draws: NDArray[np.float64] = np.full(4, 0.5)
    assert Resize(2).draws == CenterCrop(2).draws == Normalize([0], [1]).draws == 0
    assert RandomResizedCrop(2).box(9, 9, draws[: RandomResizedCrop.draws])
    assert not any(kind.is_batch for kind in (Resize, CenterCrop, RandomResizedCrop))
    assert all(kind.is_batch for kind in (Flip, RandomCrop, RandomErasing, Normalize))
