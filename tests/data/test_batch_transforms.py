import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.batch import RAGGED
from paceline.data.transforms.base import BatchTransform
from paceline.data.transforms.batch import Normalize, RandomErasing
from paceline.data.transforms.geometric import RandomCrop, RandomHorizontalFlip


def batch(*shape: int) -> Tensor:
    return (torch.arange(math.prod(shape)) % 256).to(torch.uint8).view(shape)


def uniform(count: int, draws: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((count, draws)))


def changed(transform: BatchTransform, images: Tensor, draws: Tensor) -> Tensor:
    """What a transform makes of a batch of images alone."""
    result = transform({"image": images}, draws)
    assert list(result) == ["image"]
    image: Tensor = result["image"]
    return image


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
    assert changed(RandomHorizontalFlip(0.5), images, draws).flatten(1).tolist() == [[2, 1, 0], [3, 4, 5], [8, 7, 6]]
    assert torch.equal(changed(RandomHorizontalFlip(0.0), images, draws), images)
    assert torch.equal(changed(RandomHorizontalFlip(1.0), images, draws), images.flip(-1))


@pytest.mark.usefixtures("_determinism")
def test_random_crop_by_hand() -> None:
    images = batch(3, 1, 2, 2) + 1  # 1 2 / 3 4, then 5 6 / 7 8, then 9 10 / 11 12
    draws = torch.tensor([[0.0, 0.0], [0.5, 0.5], [0.99, 0.34]], dtype=torch.float64)
    assert changed(RandomCrop(2, padding=1), images, draws).tolist() == [
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
    crop = RandomCrop(shape[2:], padding)
    assert torch.equal(changed(crop, images, draws), expected)
    assert torch.equal(changed(crop, images.float(), draws), expected.float())
    if shape[1] > 1:
        strided = images.contiguous(memory_format=torch.channels_last)
        assert torch.equal(changed(crop, strided, draws), expected)


def test_random_erasing_by_hand() -> None:
    # A quarter of 4×8 at aspect 0.5 (height / width): sqrt(8 · 0.5) = 2 rows and sqrt(8 / 0.5) = 4 columns.
    erase = RandomErasing(p=0.5, scale=(0.25, 0.25), ratio=(0.5, 0.5), value=7)
    images = torch.ones(2, 2, 4, 8, dtype=torch.uint8)
    draws = torch.tensor([[0.49, 0, 0, 0.99, 0.2], [0.5, 0, 0, 0, 0]], dtype=torch.float64)
    result = changed(erase, images, draws)
    expected = images.clone()
    expected[0, :, 2:4, 1:5] = 7  # row int(0.99 · 3), column int(0.2 · 5)
    assert torch.equal(result, expected)


@pytest.mark.usefixtures("_determinism")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_random_erasing_equals_erasing_one_by_one(dtype: torch.dtype, value: float) -> None:
    erase = RandomErasing(p=0.6, value=value)
    images, draws = (batch(40, 3, 13, 9) + 1).to(dtype), uniform(40, 5)
    expected = images.clone()
    hidden = 0
    for i, (drawn, area, aspect, top, left) in enumerate(draws.tolist()):
        pixels = (0.02 + 0.31 * area) * 13 * 9
        shape = math.exp(math.log(0.3) + math.log(3.3 / 0.3) * aspect)
        rows, columns = (max(1, round(math.sqrt(side))) for side in (pixels * shape, pixels / shape))
        rows, columns = min(rows, 13), min(columns, 9)
        if drawn < 0.6:
            start, across = int(top * (13 - rows + 1)), int(left * (9 - columns + 1))
            expected[i, :, start : start + rows, across : across + columns] = value
            hidden += 1
    assert 10 < hidden < 40
    assert torch.equal(changed(erase, images, draws), expected)


def test_erasing_value_stays_within_whole_pixels() -> None:
    images = torch.ones(1, 1, 2, 2, dtype=torch.uint8)
    draws = torch.zeros(1, 5, dtype=torch.float64)
    bright = RandomErasing(1.0, scale=(1.0, 1.0), ratio=(1.0, 1.0), value=300)
    dark = RandomErasing(1.0, scale=(1.0, 1.0), ratio=(1.0, 1.0), value=-2)
    assert changed(bright, images, draws).flatten().tolist() == [255] * 4
    assert changed(dark, images, draws).flatten().tolist() == [0] * 4
    assert changed(dark, images.float(), draws).flatten().tolist() == [-2] * 4


@pytest.mark.parametrize(("dtype", "largest"), [(torch.uint8, 255), (torch.float32, 1)])
def test_normalize_equals_its_formula(dtype: torch.dtype, largest: int) -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    images = batch(5, 3, 7, 8).to(dtype).div(255 / largest).to(dtype)
    expected = (images.numpy().astype(np.float64) / largest - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    before = images.clone()
    result = changed(Normalize(mean, std), images, torch.empty(5, 0))
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=1e-6)
    assert torch.equal(images, before)


def test_one_mean_serves_all_channels() -> None:
    images, draws = batch(2, 3, 4, 5), torch.empty(2, 0)
    one, three = Normalize([0.2861], [0.353]), Normalize([0.2861] * 3, [0.353] * 3)
    assert torch.equal(changed(one, images, draws), changed(three, images, draws))


def test_normalize_names_both_numbers_of_channels() -> None:
    with pytest.raises(DataError, match="2 means but the images have 3 channels"):
        changed(Normalize([0.5, 0.5], [1, 1]), batch(1, 3, 2, 2), torch.empty(1, 0))


BATCH_TRANSFORMS = [RandomHorizontalFlip(), RandomCrop([8, 6], 2), RandomErasing(0.7), Normalize([0.4], [0.3])]


@pytest.mark.usefixtures("_determinism")
@pytest.mark.parametrize("transform", BATCH_TRANSFORMS, ids=lambda transform: type(transform).__name__)
def test_a_sample_does_not_depend_on_its_batch(transform: BatchTransform) -> None:
    images, draws = batch(17, 3, 8, 6), uniform(17, transform.draws)
    before = images.clone()
    together = changed(transform, images, draws)
    assert torch.equal(together, changed(transform, images, draws))
    alone = torch.cat([changed(transform, images[i : i + 1], draws[i : i + 1]) for i in range(17)])
    assert torch.equal(together, alone)
    assert torch.equal(images, before)
    assert torch.equal(changed(copy.deepcopy(transform), images, draws), together)


# --- objects, masks and clips -------------------------------------------------------------------------------------


def scene() -> dict[str, Any]:
    """Two samples of 10 × 20 pixels: two objects of three joints, the last of which is not labeled; and none."""
    boxes = torch.tensor([[2.0, 1, 6, 5], [12, 4, 20, 10]])
    joints = torch.tensor([[[3.0, 2, 2], [5, 4, 1], [0, 0, 0]], [[13.0, 5, 2], [19, 9, 2], [0, 0, 0]]])
    masks = torch.zeros(2, 10, 20, dtype=torch.uint8)
    masks[0, 1:5, 2:6] = 1
    masks[1, 4:10, 12:20] = 1
    return {
        "id": torch.tensor([7, 8]),
        "image": batch(2, 3, 10, 20),
        "mask": batch(2, 10, 20),
        "boxes": [boxes, torch.empty(0, 4)],
        "classes": [torch.tensor([3, 1]), torch.empty(0, dtype=torch.int64)],
        "masks": [masks, masks[:0]],
        "keypoints": [joints, torch.empty(0, 3, 3)],
        "crowd": [torch.tensor([False, True]), torch.empty(0, dtype=torch.bool)],
        "area": [torch.tensor([16.0, 48]), torch.empty(0)],
        "matrix": torch.tensor([[[1.0, 0, 5], [0, 2, 6]]]).repeat(2, 1, 1),
    }


def alone(number: int) -> dict[str, Any]:
    """One of the two samples as arrays."""
    sample = {name: value[number].numpy() for name, value in scene().items() if name not in ("id", "image")}
    return sample | {"image": scene()["image"][number].permute(1, 2, 0).numpy()}


def test_flip_mirrors_masks_and_objects_and_exchanges_joints_of_a_pair() -> None:
    given = alone(0)
    result = RandomHorizontalFlip(0.5, pairs=[(0, 1)]).on_sample(given, np.array([0.1]))
    assert np.array_equal(result["image"], given["image"][:, ::-1])
    assert np.array_equal(result["mask"], given["mask"][:, ::-1])
    assert result["boxes"].tolist() == [[14, 1, 18, 5], [0, 4, 8, 10]]
    assert result["keypoints"].tolist() == [
        [[15, 4, 1], [17, 2, 2], [0, 0, 0]],
        [[1, 9, 2], [7, 5, 2], [0, 0, 0]],
    ]
    assert np.array_equal(result["masks"], given["masks"][..., ::-1])
    assert result["classes"] is given["classes"]
    # The way back: x = 14 of the mirrored image is x = 6 of the given one, which lay at 11 in the image as read.
    assert (result["matrix"] @ [14.0, 1, 1]).tolist() == [11, 8]


def test_flip_twice_changes_nothing() -> None:
    flip = RandomHorizontalFlip(1.0, pairs=[(0, 1)])
    again = flip.on_sample(flip.on_sample(alone(0), np.zeros(1)), np.zeros(1))
    assert again.keys() == alone(0).keys()
    assert all(np.array_equal(again[name], value) for name, value in alone(0).items())


def test_keypoints_are_not_flipped_without_knowing_pairs() -> None:
    with pytest.raises(DataError, match="which are left and right"):
        RandomHorizontalFlip().on_sample(alone(0), np.zeros(1))


@pytest.mark.parametrize("transform", [RandomHorizontalFlip(), RandomCrop(4)])
def test_objects_are_not_moved_in_batches(transform: BatchTransform) -> None:
    with pytest.raises(DataError, match=r"^random_.* put it before the transforms of batches"):
        transform(scene(), uniform(2, transform.draws))


def test_random_crop_moves_masks_and_objects() -> None:
    given = alone(0)
    # A window that begins at (0, 12) of an image with 8 pixels around it: 8 down and 4 left.
    crop = RandomCrop([10, 20], 8, mask_fill=255, min_visible=0.0)
    result = crop.on_sample(given, np.array([0.0, 12.5 / 17]))
    assert np.array_equal(result["image"][8:, :16], given["image"][:2, 4:])
    assert np.array_equal(result["mask"][8:, :16], given["mask"][:2, 4:])
    assert (result["mask"][:8] == 255).all()
    # The first box is cut at the left border and the lower one; the second one is below the image.
    assert result["boxes"].tolist() == [[0, 9, 2, 10]]
    assert result["classes"].tolist() == [3]
    assert result["crowd"].tolist() == [False]
    assert result["area"].tolist() == [2.0]
    assert result["keypoints"].tolist() == [[[0, 0, 0]] * 3]
    assert result["masks"].sum() == 2
    assert result["masks"][0, 9, :2].tolist() == [1, 1]
    assert (result["matrix"] @ [0.0, 9, 1]).tolist() == [9, 8]  # was x = 4, y = 1
    assert [len(crop.on_sample(alone(1), np.zeros(2))[name]) for name in RAGGED] == [0] * len(RAGGED)


CROPS = st.builds(
    RandomCrop,
    size=st.tuples(st.integers(1, 25), st.integers(1, 35)),
    padding=st.integers(0, 8),
    fill=st.sampled_from([0, 7, [1, 2, 3]]),
    mask_fill=st.sampled_from([0, 255]),
    min_visible=st.sampled_from([0.0, 0.1, 0.5]),
)
FLIPS = st.builds(RandomHorizontalFlip, p=st.sampled_from([0.0, 0.5, 1.0]), pairs=st.just([(0, 1)]))


@given(CROPS | FLIPS, st.integers(0, 99), st.sampled_from([torch.uint8, torch.float32]))
def test_both_forms_do_the_same_with_the_same_draws(
    transform: RandomCrop | RandomHorizontalFlip, seed: int, dtype: torch.dtype
) -> None:
    draws = uniform(2, transform.draws, seed)
    images, masks = scene()["image"].to(dtype), scene()["mask"]
    after = transform({"image": images, "mask": masks}, draws)
    for number in range(2):
        sample = {"image": images[number].permute(1, 2, 0).numpy(), "mask": masks[number].numpy()}
        expected = transform.on_sample(sample, draws[number].numpy())
        np.testing.assert_array_equal(after["image"][number].permute(1, 2, 0).numpy(), expected["image"])
        np.testing.assert_array_equal(after["mask"][number].numpy(), expected["mask"])


def test_random_crop_of_a_batch_fills_each_channel() -> None:
    images = batch(2, 3, 2, 2) + 1
    result = changed(RandomCrop(4, fill=[7, 8, 9]), images, uniform(2, 2))
    assert torch.equal(result[..., 1:3, 1:3], images)
    assert [result[0, channel, 0].tolist() for channel in range(3)] == [[7] * 4, [8] * 4, [9] * 4]
    with pytest.raises(DataError, match="fill has 2 values but the images have 3 channels"):
        changed(RandomCrop(4, fill=[7, 8]), images, uniform(2, 2))


@pytest.mark.parametrize("transform", BATCH_TRANSFORMS, ids=lambda transform: type(transform).__name__)
def test_all_frames_of_a_clip_are_changed_alike(transform: BatchTransform) -> None:
    clips, draws = batch(5, 3, 4, 8, 6), uniform(5, transform.draws)
    together = changed(transform, clips, draws)
    assert together.shape == clips.shape
    for moment in range(4):
        assert torch.equal(together[:, :, moment], changed(transform, clips[:, :, moment], draws))


@pytest.mark.parametrize(
    "transform", [RandomHorizontalFlip(pairs=[]), RandomCrop([10, 20], 2), RandomErasing(0.7), Normalize([0.4], [0.3])]
)
def test_the_given_batch_stays_as_it_is(transform: BatchTransform) -> None:
    names = ("image", "mask") if hasattr(transform, "on_sample") else scene().keys()
    given = {name: scene()[name] for name in names}
    transform(given, uniform(2, transform.draws))
    assert_same(given, {name: scene()[name] for name in names})


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        pairs = zip(found[name], value, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name


def test_normalize_finds_the_channels_behind_the_views_of_a_video() -> None:
    views = torch.arange(2 * 3 * 3 * 2 * 1 * 2, dtype=torch.uint8).view(2, 3, 3, 2, 1, 2)  # [N, V, C, T, H, W]
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 1.0]
    found = Normalize(mean, std)({"image": views}, torch.empty(2, 0))["image"]
    for channel in range(3):
        expected = (views[:, :, channel].double() / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(found[:, :, channel].double(), expected, atol=1e-6, rtol=0)
