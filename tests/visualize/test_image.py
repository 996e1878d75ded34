"""Images as arrays: from tensors, at other sizes, into files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from paceline.visualize.image import Image, fit, load_font, save_png, to_ascii, to_image, to_rgb, truncate, wrap


def plain(height: int, width: int, color: tuple[int, int, int] = (10, 20, 30)) -> Image:
    return np.full((height, width, 3), color, np.uint8)


def test_values_are_stretched_to_the_range_of_an_image() -> None:
    image = to_image(torch.tensor([[[-2.0, 0.0]], [[0.0, 3.0]], [[0.5, -2.0]]]))
    assert image.tolist() == [[[0, 102, 128], [102, 255, 0]]]
    assert to_image(torch.full((3, 2, 2), 0.7)).max() == 0
    assert to_image(torch.full((3, 2, 2), torch.nan)).shape == (2, 2, 3)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("frames", [(), (5,)])
def test_any_number_of_channels_makes_an_rgb_image(channels: int, frames: tuple[int, ...]) -> None:
    values = torch.arange(channels * 5 * 6).float().view(channels, *([1] * len(frames)), 5, 6)
    image = to_image(values.expand(channels, *frames, 5, 6))
    assert image.shape == (*frames, 5, 6, 3)
    assert image.flags.c_contiguous
    gray = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
    np.testing.assert_array_equal(to_rgb(gray), gray.repeat(3, -1))


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(300, 200, (96, 64)), (20, 80, (24, 96)), (48, 64, (72, 96)), (1, 500, (1, 96)), (28, 28, (84, 84))],
)
def test_aspect_ratio_is_kept(height: int, width: int, expected: tuple[int, int]) -> None:
    fitted = fit(plain(height, width), 96)
    assert fitted.shape == (*expected, 3)
    assert (fitted == (10, 20, 30)).all()


def test_small_images_grow_by_whole_factors_with_sharp_pixels() -> None:
    image = np.random.default_rng(0).integers(0, 256, (28, 20, 3), np.uint8)
    np.testing.assert_array_equal(fit(image, 96), image.repeat(3, 0).repeat(3, 1))


def test_an_image_takes_the_aspect_ratio_of_its_mask() -> None:
    assert fit(plain(224, 224), 160, (300, 400)).shape == (120, 160, 3)
    assert fit(plain(25, 30), 160, (50, 60)).shape == (100, 120, 3)


def test_a_file_is_read_back_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "images" / "a.png"
    for color in ((1, 2, 3), (200, 100, 0)):
        save_png(plain(4, 6, color), path)
        with PILImage.open(path) as image:
            assert image.format == "PNG"
            np.testing.assert_array_equal(np.asarray(image), plain(4, 6, color))
    assert [entry.name for entry in path.parent.iterdir()] == ["a.png"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    save_png(plain(4, 6), path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(OSError, match="No space left"):
        save_png(plain(9, 9), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.png"]


def test_text_is_truncated_to_the_width_there_is() -> None:
    font = load_font(12)
    assert truncate("Bag", font, 100) == "Bag"
    shortened = truncate("an unreasonably long class name", font, 80)
    assert shortened.endswith("…")
    assert font.getlength(shortened) <= 80


def test_captions_take_two_lines_at_most() -> None:
    font = load_font(12)
    assert wrap("Bag", font, 96) == ["Bag"]
    assert wrap("", font, 96) == []
    assert wrap("Ankle boot, not Pullover", font, 96) == ["Ankle boot, not", "Pullover"]
    lines = wrap("one two three four five six seven eight nine ten eleven twelve", font, 96)
    assert len(lines) == 2
    assert all(font.getlength(line) <= 96 for line in lines)


def test_letters_that_the_font_lacks_are_replaced() -> None:
    assert to_ascii("café × naïve – 猫…") == "cafe x naive - ?..."
