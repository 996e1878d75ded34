from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.core.torchvision_ops import import_torchvision
from paceline.data.batch import Sample
from paceline.data.transforms import color
from paceline.data.transforms.color import AFFINE_OPERATIONS, COLOR_OPERATIONS, OPERATIONS, RandAugment

import_torchvision()
from torchvision.transforms import InterpolationMode  # noqa: E402
from torchvision.transforms.v2 import functional as oracle  # noqa: E402


def choice(*names: str, direction: float = 0.0) -> NDArray[np.float64]:
    """Draws that choose these changes."""
    return np.array([draw for name in names for draw in ((OPERATIONS.index(name) + 0.5) / len(OPERATIONS), direction)])


def scene(height: int = 24, width: int = 30, channels: int = 3) -> Sample:
    image = np.random.default_rng(0).integers(20, 230, (height, width, channels), np.uint8)
    masks = np.zeros((1, height, width), np.uint8)
    masks[0, 8:16, 10:20] = 1
    return {
        "image": image,
        "mask": masks[0] * 5,
        "boxes": np.array([[10, 8, 20, 16]], np.float32),
        "classes": np.array([2]),
        "masks": masks,
        "keypoints": np.array([[[15, 12, 2], [0, 0, 0]]], np.float32),
    }


def test_there_are_fourteen_changes() -> None:
    assert len(OPERATIONS) == len(set(OPERATIONS)) == 14
    assert RandAugment(num_ops=3).draws == 6


@pytest.mark.parametrize("name", ["identity", *COLOR_OPERATIONS])
def test_colors_change_alone(name: str) -> None:
    sample = scene()
    result = RandAugment(1, 15.0)(sample, choice(name))
    assert all(result[field] is sample[field] for field in sample if field != "image")
    assert np.array_equal(result["image"], sample["image"]) == (name == "identity")


def test_strengths_by_hand() -> None:
    sample = scene()
    image = sample["image"]
    augment = RandAugment(1, 10.0)  # a third

    def found(name: str, direction: float = 0.0) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = augment(sample, choice(name, direction=direction))["image"]
        return pixels

    assert np.array_equal(found("brightness"), color.scale_pixels(image, 1.3))
    assert np.array_equal(found("brightness", 0.5), color.scale_pixels(image, 0.7))
    assert np.array_equal(found("sharpness"), color.adjust_sharpness(image, 1.3))
    assert np.array_equal(found("posterize"), image & 0b1111_1110)
    assert np.array_equal(found("posterize", 0.5), image & 0b1111_1110)
    assert np.array_equal(found("solarize"), np.where(image >= 171, 255 - image, image))


def test_changes_follow_each_other() -> None:
    sample = scene()
    result = RandAugment(2, 15.0)(sample, choice("solarize", "contrast"))
    expected = color.adjust_contrast(color.solarize(sample["image"], 128), 1.45)
    assert np.array_equal(result["image"], expected)


@pytest.mark.parametrize(("direction", "sign"), [(0.0, 1), (0.5, -1)])
def test_moves_take_objects_along(direction: float, sign: int) -> None:
    sample = scene()
    augment = RandAugment(1, 10.0, mask_fill=255)
    across = augment(sample, choice("translate_x", direction=direction))
    by = round(150 / 331 * 30 / 3) * sign
    assert across["boxes"].tolist() == [[10 + by, 8, 20 + by, 16]]
    assert across["keypoints"][0].tolist() == [[15 + by, 12, 2], [0, 0, 0]]
    assert np.array_equal(across["masks"][0], np.roll(sample["masks"][0], by, 1))
    assert (across["mask"] == 255).sum() == 24 * abs(by)
    turned = augment(sample, choice("rotate", direction=direction))
    np.testing.assert_allclose(turned["keypoints"][0, 0], [15, 12, 2], atol=1e-5)  # the middle stays
    sheared = augment(
        {"image": sample["image"], "keypoints": np.array([[[15, 22, 2.0]]], np.float32)}, choice("shear_x")
    )
    np.testing.assert_allclose(sheared["keypoints"][0, 0], [16, 22, 2], atol=1e-5)  # 10 below the middle, a tenth of it


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rotate", {"angle": 15.0, "translate": [0, 0], "shear": [0.0, 0.0]}),
        ("translate_x", {"angle": 0.0, "translate": [round(150 / 331 * 64 / 2), 0], "shear": [0.0, 0.0]}),
        ("translate_y", {"angle": 0.0, "translate": [0, round(150 / 331 * 48 / 2)], "shear": [0.0, 0.0]}),
    ],
)
def test_pixels_move_as_in_torchvision(name: str, arguments: dict[str, Any]) -> None:
    rows, columns = np.mgrid[0:48, 0:64]
    image = np.stack([rows * 5, columns * 3, rows + columns], -1).astype(np.uint8)
    found = RandAugment(1, 15.0)({"image": image}, choice(name))["image"]
    planes = torch.from_numpy(image).permute(2, 0, 1)
    moved = oracle.affine(planes, scale=1.0, interpolation=InterpolationMode.BILINEAR, **arguments)
    difference = np.abs(found.astype(np.int64) - moved.permute(1, 2, 0).numpy())
    inner = (moved.permute(1, 2, 0).numpy() > 0).all(-1)
    assert np.quantile(difference[inner], 0.98) <= 2  # but for those at the border of what is filled


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 999), st.integers(1, 4), st.floats(0, 30), st.sampled_from([1, 3]), st.booleans(), st.integers(4, 20)
)
def test_any_choice_keeps_shapes(
    seed: int, number: int, magnitude: float, channels: int, is_clip: bool, height: int
) -> None:
    numbers = np.random.default_rng(seed)
    shape = (*[3] * is_clip, height, 9, channels)
    image = numbers.integers(0, 256, shape, np.uint8)
    before = image.copy()
    augment = RandAugment(number, magnitude)
    draws = numbers.random(augment.draws)
    sample: Sample = {"image": image, "boxes": np.array([[1, 1, 5, 3]], np.float32), "classes": np.array([1])}
    result = augment(sample, draws)
    assert result["image"].shape == shape
    assert result["image"].dtype == np.uint8
    assert len(result["boxes"]) == len(result["classes"])
    assert (result["boxes"] >= 0).all()
    assert (result["boxes"] <= [9, height, 9, height]).all()
    assert np.array_equal(image, before)
    assert np.array_equal(result["image"], augment(sample, draws)["image"])


def test_no_strength_moves_nothing() -> None:
    sample = scene()
    for name in [*AFFINE_OPERATIONS, "brightness", "posterize", "solarize"]:
        result = RandAugment(1, 0.0)(sample, choice(name))
        assert all(np.array_equal(result[field], sample[field]) for field in sample)
