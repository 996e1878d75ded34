"""Image files that are not decoded yet: their upright size, and reductions by powers of two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.io import image as image_module
from paceline.data.io.image import Encoded


def photo(path: Path, height: int, width: int, kind: str, orientation: int = 1) -> Path:
    note = Image.Exif()
    note[0x0112] = orientation
    generator = np.random.default_rng(height * width)
    coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(path, kind, exif=note)
    return path


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_size_is_that_of_the_decoded_image(tmp_path: Path, kind: str, orientation: int) -> None:
    path = photo(tmp_path / "image", 30, 50, kind, orientation)
    encoded = Encoded.read(path)
    assert (encoded.height, encoded.width) == ((30, 50) if orientation < 5 else (50, 30))
    pixels = encoded.decode()
    assert pixels.shape == (encoded.height, encoded.width, 3)


@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 250), st.integers(0, 250), st.sampled_from([1, 6]))
@settings(max_examples=80, deadline=None)
def test_jpegs_are_halved_as_often_as_they_may(
    tmp_path_factory: pytest.TempPathFactory, height: int, width: int, least: int, other: int, orientation: int
) -> None:
    path = photo(tmp_path_factory.mktemp("one") / "image.jpg", height, width, "JPEG", orientation)
    encoded = Encoded.read(path)
    found = encoded.decode(least, other).shape[:2]
    shares = [(-(-encoded.height // divisor), -(-encoded.width // divisor)) for divisor in (8, 4, 2)]
    fitting = [share for share in shares if share[0] >= least and share[1] >= other]
    assert found == (fitting[0] if fitting and (least or other) else (encoded.height, encoded.width))


def test_other_formats_are_never_reduced(tmp_path: Path) -> None:
    assert Encoded.read(photo(tmp_path / "image", 64, 96, "PNG")).decode(8, 8).shape == (64, 96, 3)


def test_what_is_wrong_is_found_as_early_as_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = photo(tmp_path / "image.jpg", 64, 96, "JPEG")
    with monkeypatch.context() as patched:
        patched.setattr(image_module, "MAX_PIXELS", 100)
        with pytest.raises(DataError, match=r"image\.jpg: 96×64 is more than 100 pixels"):
            Encoded.read(path)
    path.write_bytes(path.read_bytes()[:-20])
    encoded = Encoded.read(path)
    for size in ((0, 0), (8, 8)):
        with pytest.raises(DataError, match=r"image\.jpg: damaged or truncated"):
            encoded.decode(*size)
    path.write_text("words")
    with pytest.raises(DataError, match=r"image\.jpg: not an image"):
        Encoded.read(path)
