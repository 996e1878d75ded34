import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.data.batch import Sample
from paceline.data.transforms import color
from paceline.data.transforms.base import SampleTransform
from paceline.data.transforms.color import ColorJitter, RandomPhotometricDistort

ALL: list[SampleTransform] = [
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    RandomPhotometricDistort(),
]
IMAGE = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)


def draws_of(*values: float) -> NDArray[np.float64]:
    return np.array(values)


def changed(transform: SampleTransform, *values: float) -> NDArray[np.uint8]:
    result: NDArray[np.uint8] = transform({"image": IMAGE}, draws_of(*values))["image"]
    return result


def test_jitter_comes_in_the_drawn_order() -> None:
    jitter = ColorJitter(brightness=0.4, contrast=0.5, saturation=0.6, hue=0.2)
    # Factors 1.4 − ε, 0.75, 1, and a turn of −0.2; in the order hue, brightness, saturation, contrast.
    found = changed(jitter, 0.75, 0.25, 0.5, 0.0, 0.2, 0.9, 0.4, 0.1, 0.0)
    turned = color.scale_pixels(color.adjust_hue(IMAGE, -0.2), 1.2)
    assert np.array_equal(found, color.adjust_contrast(turned, 0.75))


def test_what_jitter_is_not_to_change_stays() -> None:
    assert np.array_equal(changed(ColorJitter(), *[0.9] * 9), IMAGE)
    assert np.array_equal(changed(ColorJitter(brightness=1.0, p=0.5), *[0.9] * 9), IMAGE)
    # Beyond 1 a factor would be negative: then it is 0.
    assert not changed(ColorJitter(brightness=3.0), *[0.0] * 9).any()


def test_distortion_by_hand() -> None:
    distort = RandomPhotometricDistort()
    none = [0.9] * 5
    assert np.array_equal(changed(distort, *[0.3] * 5, *none, 0.0), IMAGE)
    brighter = changed(distort, 0.75, *[0.0] * 4, 0.0, *[0.9] * 4, 0.0)
    assert np.array_equal(brighter, color.scale_pixels(IMAGE, 1.0, 16))
    early, late = (changed(distort, 0, 1, 0, 0.75, 0, 0.9, 0.1, 0.9, 0.1, 0.9, when) for when in (0.7, 0.2))
    assert np.array_equal(early, color.adjust_hue(color.scale_pixels(IMAGE, 1.5), 0.025))
    assert np.array_equal(late, color.scale_pixels(color.adjust_hue(IMAGE, 0.025), 1.5))
    paler = changed(distort, 0, 0, 0.0, 0, 0, 0.9, 0.9, 0.1, 0.9, 0.9, 0)
    assert np.array_equal(paler, color.adjust_hue_and_saturation(IMAGE, 0.0, 0.5))
    exchanged = changed(distort, 0, 0, 0, 0, 0.99, 0.9, 0.9, 0.9, 0.9, 0.1, 0)
    assert np.array_equal(exchanged, IMAGE[..., ::-1])


@pytest.mark.parametrize("transform", ALL, ids=lambda transform: type(transform).__name__)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), channels=st.sampled_from([1, 3]), frames=st.sampled_from([0, 1, 3]))
def test_only_colors_change_and_frames_alike(transform: SampleTransform, seed: int, channels: int, frames: int) -> None:
    numbers = np.random.default_rng(seed)
    frame = numbers.integers(0, 256, (6, 5, channels), np.uint8)
    image = np.stack([frame] * frames) if frames else frame
    sample: Sample = {"image": image, "label": 3, "boxes": np.ones((2, 4), np.float32)}
    draws = numbers.random(transform.draws)
    result = transform(sample, draws)
    assert result["image"].shape == image.shape
    assert result["image"].dtype == np.uint8
    assert result["boxes"] is sample["boxes"]
    alone = transform({"image": frame}, draws)["image"]
    assert np.array_equal(result["image"], np.broadcast_to(alone, image.shape))
    assert np.array_equal(sample["image"], image)
