"""Another size, compared with Pillow, whose averaging is the same to a rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paceline.data.transforms.functional import resize_image

SIDES = st.integers(1, 60)


@given(SIDES, SIDES, SIDES, SIDES, st.sampled_from([1, 3]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_it_is_what_pillow_does(height: int, width: int, rows: int, columns: int, channels: int, cut: bool) -> None:
    generator = np.random.default_rng(0)
    image = generator.integers(0, 256, (height + 2, width + 2, channels), dtype=np.uint8)
    image = image[1:-1, 1:-1] if cut else np.ascontiguousarray(image[1:-1, 1:-1])
    image.flags.writeable = False
    found = resize_image(image, rows, columns)
    pillow = Image.fromarray(image if channels == 3 else image[:, :, 0])
    expected = np.asarray(pillow.resize((columns, rows), Image.Resampling.BILINEAR)).reshape(rows, columns, channels)
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 2


@pytest.mark.parametrize("size", [(8, 9), (20, 30), (12, 40)])
def test_a_clip_is_its_frames(size: tuple[int, int]) -> None:
    clip = np.random.default_rng(0).integers(0, 256, (3, 16, 20, 3), dtype=np.uint8)
    found = resize_image(clip, *size)
    gaps = [np.abs(one.astype(int) - resize_image(frame, *size)).max() for one, frame in zip(found, clip, strict=True)]
    assert max(gaps) <= (0 if size < (16, 20) else 1)


def test_the_same_size_is_the_same_image() -> None:
    image = np.zeros((3, 4, 3), np.uint8)
    assert resize_image(image, 3, 4) is image
