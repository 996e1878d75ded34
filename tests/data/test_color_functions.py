from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import DataError
from paceline.core.torchvision_ops import import_torchvision
from paceline.data.transforms import color
from paceline.data.transforms.color import Pixels

import_torchvision()
from torchvision.transforms.v2 import functional as oracle  # noqa: E402


def source_image(*shape: int, seed: int = 0) -> Pixels:
    """Smooth patches of many colors, as photographs have them."""
    noise = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    if min(shape[-3:-1]) < 8:
        return noise
    frames = noise.reshape(-1, *shape[-3:])
    smooth = np.stack([cv2.GaussianBlur(frame, (0, 0), 1.5).reshape(frame.shape) for frame in frames]).reshape(shape)
    stretched: Pixels = np.clip((smooth.astype(np.float64) - 128) * 4 + 128, 0, 255).astype(np.uint8)
    return stretched


def expected(function: Callable[..., Any], image: Pixels, *arguments: Any) -> Pixels:
    result: Pixels = function(torch.from_numpy(image).permute(2, 0, 1), *arguments).permute(1, 2, 0).numpy()
    return result


def difference(one: Pixels, other: Pixels) -> int:
    return int(np.abs(one.astype(np.int64) - other).max())


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7, 3.0])
@pytest.mark.parametrize(
    ("change", "function"),
    [
        (color.scale_pixels, oracle.adjust_brightness),
        (color.adjust_contrast, oracle.adjust_contrast),
        (color.adjust_saturation, oracle.adjust_saturation),
        (color.adjust_sharpness, oracle.adjust_sharpness),
    ],
)
def test_factors_do_what_torchvision_does(change: Any, function: Any, factor: float) -> None:
    image = source_image(40, 33, 3)
    assert difference(change(image, factor), expected(function, image, factor)) <= 2
    assert difference(change(image, 1.0), image) == 0


@pytest.mark.parametrize("turn", [-0.5, -0.21, 0.0, 0.07, 0.5])
def test_hue_turns_as_in_torchvision(turn: float) -> None:
    image = source_image(40, 33, 3)
    assert difference(color.adjust_hue(image, turn), expected(oracle.adjust_hue, image, turn)) <= 1


def test_a_third_of_a_turn_makes_green_of_red() -> None:
    red = np.array([[[200, 20, 20]]], np.uint8)
    assert color.adjust_hue(red, 1 / 3).tolist() == [[[20, 200, 20]]]
    assert color.adjust_hue_and_saturation(red, 0.0, 0.5).tolist() == [[[200, 110, 110]]]
    assert color.adjust_hue_and_saturation(red, 0.0, 5.0).tolist() == [[[200, 0, 0]]]


@pytest.mark.parametrize(
    ("change", "function", "arguments"),
    [
        (color.solarize, oracle.solarize, (128,)),
        (color.posterize, oracle.posterize, (3,)),
        (color.posterize, oracle.posterize, (8,)),
        (color.autocontrast, oracle.autocontrast, ()),
        (color.equalize, oracle.equalize, ()),
    ],
)
def test_tables_are_those_of_torchvision(change: Any, function: Any, arguments: Any) -> None:
    image = source_image(40, 33, 3) // 2 + 30
    assert difference(change(image, *arguments), expected(function, image, *arguments)) <= 1


def test_by_hand() -> None:
    image = np.array([[[100, 50, 0]]], np.uint8)
    assert color.scale_pixels(image, 1.5, 10).tolist() == [[[160, 85, 10]]]
    assert color.scale_pixels(image, 3.0, -20).tolist() == [[[255, 130, 0]]]
    assert color.adjust_saturation(image, 0.5).tolist() == [[[80, 55, 30]]]
    assert color.adjust_contrast(image, 0.5).tolist() == [[[80, 55, 30]]]
    assert color.adjust_contrast(np.array([[[10], [30]]], np.uint8), 2.0)[..., 0].tolist() == [[0, 40]]


CHANGES: dict[str, Callable[[Pixels], Pixels]] = {
    "scale": lambda image: color.scale_pixels(image, 1.3, -9),
    "contrast": lambda image: color.adjust_contrast(image, 1.4),
    "saturation": lambda image: color.adjust_saturation(image, 0.3),
    "hue": lambda image: color.adjust_hue(image, 0.2),
    "solarize": lambda image: color.solarize(image, 77),
    "posterize": lambda image: color.posterize(image, 2),
    "autocontrast": color.autocontrast,
    "equalize": color.equalize,
    "sharpness": lambda image: color.adjust_sharpness(image, 1.9),
}


@pytest.mark.parametrize("name", CHANGES)
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 3]), st.sampled_from([0, 1, 3]), st.booleans())
def test_shapes_stay_and_so_does_what_is_given(
    name: str, height: int, width: int, channels: int, frames: int, is_part: bool
) -> None:
    shape = (*[frames] * (frames > 0), height, width, channels)
    image = source_image(*shape)
    if is_part:  # a view into something larger, as crops are
        image = np.pad(image, [(0, 0)] * (image.ndim - 3) + [(1, 2), (2, 1), (0, 0)])[..., 1:-2, 2:-1, :]
    before = image.copy()
    result = CHANGES[name](image)
    assert result.shape == image.shape
    assert result.dtype == np.uint8
    assert np.array_equal(image, before)
    if frames > 1 and name != "equalize":  # the same frame again and again is changed as it is alone
        still = np.broadcast_to(image[:1], image.shape)
        assert np.array_equal(CHANGES[name](still), np.broadcast_to(CHANGES[name](image[0]), image.shape))


@pytest.mark.parametrize("name", ["contrast", "autocontrast", "equalize"])
def test_what_looks_at_a_whole_image_looks_at_a_whole_clip(name: str) -> None:
    clip = source_image(3, 16, 12, 3)
    clip[1] //= 4
    tall = clip.reshape(48, 12, 3)
    assert np.array_equal(CHANGES[name](clip).reshape(48, 12, 3), CHANGES[name](tall))


def test_colors_need_three_channels() -> None:
    with pytest.raises(DataError, match="this one has 4"):
        color.adjust_hue(np.zeros((2, 2, 4), np.uint8), 0.1)
    assert color.scale_pixels(np.ones((2, 2, 5), np.uint8), 3.0).tolist() == np.full((2, 2, 5), 3).tolist()
