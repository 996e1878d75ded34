import io
import os
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageOps

from paceline.core.errors import DataError
from paceline.data.io import image as image_module
from paceline.data.io.image import MAX_PIXELS, Encoded

HEIGHT, WIDTH = 40, 56


@pytest.fixture
def photo() -> Image.Image:
    """Smooth enough for lossy formats, and different in every corner and channel."""
    down, across = np.mgrid[0:HEIGHT, 0:WIDTH]
    channels = [down * 255 / HEIGHT, across * 255 / WIDTH, 255 - (down + across) * 255 / (HEIGHT + WIDTH)]
    return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8))


def decode_image(path: Path, max_pixels: int = MAX_PIXELS, min_size: tuple[int, int] = (0, 0)) -> NDArray[np.uint8]:
    with mock.patch.object(image_module, "MAX_PIXELS", max_pixels):
        return Encoded.read(path).decode(*min_size)


def saved(image: Image.Image, path: Path, kind: str, **options: Any) -> Path:
    image.save(path, kind, **options)
    return path


def difference(found: NDArray[np.uint8], expected: NDArray[Any] | Image.Image) -> int:
    wanted = np.asarray(expected, np.int64)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert found.flags.writeable
    assert found.shape == wanted.shape
    return int(np.abs(found.astype(np.int64) - wanted).max())


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_lossless_formats_come_back_exactly(tmp_path: Path, photo: Image.Image, kind: str, mode: str) -> None:
    image = photo.convert(mode)
    # The name says nothing: the content decides.
    assert difference(decode_image(saved(image, tmp_path / "image.jpg", kind)), image.convert("RGB")) == 0


def test_webp_and_gif(tmp_path: Path, photo: Image.Image) -> None:
    webp = saved(photo, tmp_path / "image.webp", "WEBP", lossless=True)
    assert difference(decode_image(webp), photo) == 0
    frames = [photo.convert("P"), ImageOps.invert(photo).convert("P")]
    gif = saved(frames[0], tmp_path / "image.gif", "GIF", save_all=True, append_images=frames[1:])
    assert difference(decode_image(gif), frames[0].convert("RGB")) == 0


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"optimize": True}])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_jpeg_equals_pillow_to_rounding(tmp_path: Path, photo: Image.Image, mode: str, options: dict[str, Any]) -> None:
    path = saved(photo.convert(mode), tmp_path / "image.png", "JPEG", **options)
    with Image.open(path) as opened:
        assert difference(decode_image(path), opened.convert("RGB")) <= 4


def test_cmyk_jpeg(tmp_path: Path, photo: Image.Image) -> None:
    path = saved(photo.convert("CMYK"), tmp_path / "image.jpg", "JPEG", quality=98)
    assert difference(decode_image(path), photo) < 20


def test_jpeg_of_a_rare_subsampling(tmp_path: Path) -> None:
    # A flat gray image, rewritten by hand to 4:1:0: eight blocks of luminance and two of color in one unit,
    # each "no change of brightness, end of block" in the standard tables.
    stream = io.BytesIO()
    Image.new("RGB", (32, 16), (128, 128, 128)).save(stream, "JPEG", subsampling=0)
    data = bytearray(stream.getvalue())
    data[data.index(b"\xff\xc0") + 11] = 0x42
    scan = data.index(b"\xff\xda") + 14
    blocks = int("001010" * 8 + "0000" * 2, 2).to_bytes(7, "big")
    path = tmp_path / "image.jpg"
    path.write_bytes(data[:scan] + blocks + b"\xff\xd9")
    with pytest.raises(ValueError, match="subsampling"):
        simplejpeg.decode_jpeg_header(path.read_bytes())
    assert difference(decode_image(path), np.full((16, 32, 3), 128)) == 0
    assert "32×16 is more than 100 pixels" in refused(path, max_pixels=100)


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "TIFF"), ("LA", "TIFF"), ("RGBA", "WEBP")]
)
def test_transparency_shows_white(tmp_path: Path, photo: Image.Image, mode: str, kind: str) -> None:
    alpha = np.full((HEIGHT, WIDTH), 255, np.uint8)
    alpha[:5], alpha[5:10] = 0, 102
    image = photo.convert(mode[:-1])
    image.putalpha(Image.fromarray(alpha))
    options = {"lossless": True} if kind == "WEBP" else {}
    share = alpha[:, :, None] / 255
    expected = np.asarray(photo.convert(mode[:-1]).convert("RGB")) * share + 255 * (1 - share)
    assert difference(decode_image(saved(image, tmp_path / "image", kind, **options)), expected.round()) <= 1


def test_transparent_color_of_a_palette_shows_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        path = saved(image, tmp_path / "image", kind, transparency=1)
        assert decode_image(path).tolist() == [[[10, 20, 30], [255, 255, 255]]]


@pytest.mark.parametrize("name", ["image.png", "image.tif", "image.ppm"])
def test_sixteen_bits_become_eight(tmp_path: Path, photo: Image.Image, name: str) -> None:
    deep = np.asarray(photo).astype(np.uint16) * 257
    assert cv2.imwrite(str(tmp_path / name), deep[:, :, ::-1])
    assert difference(decode_image(tmp_path / name), photo) == 0


@pytest.mark.parametrize("name", ["image.png", "image.tif", "image.pgm"])
def test_sixteen_bit_grey_becomes_eight(tmp_path: Path, photo: Image.Image, name: str) -> None:
    gray = np.asarray(photo)[:, :, 0]
    assert cv2.imwrite(str(tmp_path / name), gray.astype(np.uint16) * 257)
    assert difference(decode_image(tmp_path / name), np.repeat(gray[:, :, None], 3, axis=2)) == 0


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
def test_exif_orientation_is_applied(tmp_path: Path, photo: Image.Image, kind: str, orientation: int) -> None:
    note = Image.Exif()
    note[0x0112] = orientation
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    path = saved(photo, tmp_path / "image", kind, exif=note, **options)
    with Image.open(path) as opened:
        expected = ImageOps.exif_transpose(opened).convert("RGB")
    assert expected.size == ((WIDTH, HEIGHT) if orientation < 5 else (HEIGHT, WIDTH))
    assert difference(decode_image(path), expected) <= 4


@pytest.mark.parametrize("order", ["<", ">"])
def test_exif_of_either_byte_order(tmp_path: Path, photo: Image.Image, order: str) -> None:
    entries = struct.pack(order + "HHIHH", 0x0100, 3, 1, 6, 0) + struct.pack(order + "HHIHH", 0x0112, 3, 1, 6, 0)
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HIH", 42, 8, 2)
    note = b"Exif\0\0" + head + entries + bytes(4)
    path = saved(photo, tmp_path / "image.jpg", "JPEG", exif=note)
    assert decode_image(path).shape == (WIDTH, HEIGHT, 3)
    # Cut short, or of a value that does not exist, the note is passed over.
    for damaged in (note[:20], note[:16], note.replace(entries[12:], entries[12:20] + b"\x63\x63\0\0")):
        saved(photo, path, "JPEG", exif=damaged)
        assert decode_image(path).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("orientation", [1, 6])
def test_min_size_bounds_the_reduction(tmp_path: Path, photo: Image.Image, orientation: int) -> None:
    note = Image.Exif()
    note[0x0112] = orientation
    path = saved(photo.resize((640, 320)), tmp_path / "image.jpg", "JPEG", exif=note)
    tall = orientation == 6
    full, wanted = ((640, 320), (150, 70)) if tall else ((320, 640), (70, 150))
    assert decode_image(path).shape == (*full, 3)
    height, width = decode_image(path, min_size=wanted).shape[:2]
    assert wanted[0] <= height < full[0]
    assert wanted[1] <= width < full[1]
    assert decode_image(path, min_size=(1000, 1000)).shape == (*full, 3)


# --- what is refused ----------------------------------------------------------------------------------------


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        decode_image(path, **options)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_missing_empty_and_foreign_files(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.jpg") == "no such file"
    assert refused(tmp_path).startswith("cannot be read (")
    (tmp_path / "empty.jpg").touch()
    assert refused(tmp_path / "empty.jpg") == "the file is empty (0 bytes)"
    (tmp_path / "page.jpg").write_text("<html>404</html>")
    assert refused(tmp_path / "page.jpg").startswith("not an image that can be read (JPEG, PNG")
    (tmp_path / "icon.png").write_bytes(b"\0\0\1\0")
    Image.new("RGB", (8, 8)).save(tmp_path / "icon.png", "ICO")
    assert refused(tmp_path / "icon.png").startswith("not an image that can be read")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_files(tmp_path: Path, photo: Image.Image, kind: str, share: float) -> None:
    path = saved(photo, tmp_path / "image", kind)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert "damaged or truncated" in refused(path) or "not an image" in refused(path)


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_a_jpeg_that_lacks_its_last_bytes(tmp_path: Path, photo: Image.Image, options: dict[str, Any]) -> None:
    path = saved(photo, tmp_path / "image.jpg", "JPEG", **options)
    data = path.read_bytes()
    for missing in (1, 2, 3, 10, 50):
        path.write_bytes(data[:-missing])
        assert "damaged or truncated" in refused(path)
        assert "damaged or truncated" in refused(path, min_size=(5, 5))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_too_many_pixels(tmp_path: Path, photo: Image.Image, kind: str) -> None:
    path = saved(photo, tmp_path / "image", kind)
    assert refused(path, max_pixels=HEIGHT * WIDTH - 1) == "56×40 is more than 2,239 pixels; cut it into tiles"
    assert decode_image(path, max_pixels=HEIGHT * WIDTH).shape == (HEIGHT, WIDTH, 3)


def test_a_small_file_that_claims_to_be_huge(tmp_path: Path, photo: Image.Image) -> None:
    path = saved(photo, tmp_path / "image.bmp", "BMP")
    data = bytearray(path.read_bytes())
    data[18:26] = struct.pack("<ii", 60_000, 60_000)
    path.write_bytes(data)
    assert "more than 178,956,970 pixels; cut it into tiles" in refused(path)


def test_a_scan_for_every_coefficient_is_too_much_only_for_large_images(tmp_path: Path, photo: Image.Image) -> None:
    path = saved(photo, tmp_path / "image.jpg", "JPEG", progressive=True)
    data = path.read_bytes()
    scan = data[data.index(b"\xff\xda") : data.index(b"\xff", data.index(b"\xff\xda") + 16)]
    huge = bytearray(data.replace(scan, scan * 40))
    start = huge.index(b"\xff\xc2") + 5
    huge[start : start + 4] = struct.pack(">HH", 9_000, 9_000)
    path.write_bytes(huge)
    assert "scans would take too long" in refused(path)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "I;16"])
def test_large_images_are_converted_band_by_band(
    tmp_path: Path, photo: Image.Image, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image.fromarray(np.asarray(photo)[:, :, 0].astype(np.uint16) * 257) if mode == "I;16" else photo
    options = {"transparency": 3} if mode == "P" else {}
    path = saved(image if mode == "I;16" else image.convert(mode), tmp_path / "image.png", "PNG", **options)
    whole = decode_image(path)
    monkeypatch.setattr("paceline.data.io.image._BAND", 3 * WIDTH)
    assert difference(decode_image(path), whole) == 0


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, photo: Image.Image) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    assert refused(tmp_path / "pipe.png") == "cannot be read (a pipe, not a file)"
    assert refused(Path("/dev/zero")) == "cannot be read (a device, not a file)"
    path = saved(photo, tmp_path / "image.png", "PNG")
    os.truncate(path, (1 << 29) + 1)
    assert refused(path) == "536,870,913 bytes; an image file has at most 536,870,912"


@pytest.mark.parametrize(
    "options",
    [{"lossless": True}, {"lossless": False}, {"lossless": True, "exif": b"Exif\0\0II*\0\x08\0\0\0" + bytes(6)}],
)
def test_webp_is_measured_before_it_is_opened(tmp_path: Path, options: dict[str, Any]) -> None:
    """In each of the three forms of its header."""
    path = saved(Image.new("RGB", (301, 203)), tmp_path / "image", "WEBP", **options)
    assert refused(path, max_pixels=301 * 203 - 1) == "301×203 is more than 61,102 pixels; cut it into tiles"
    assert decode_image(path).shape == (203, 301, 3)


def test_tiles_of_a_tiff_are_bounded_too(tmp_path: Path) -> None:
    tags = [
        (256, 8),
        (257, 8),
        (258, 8),
        (259, 8),
        (262, 1),
        (277, 1),
        (322, 20_000),
        (323, 20_000),
        (324, 8),
        (325, 9),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    path = tmp_path / "image.tif"
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4))
    assert refused(path) == "20000×20000 is more than 178,956,970 pixels; cut it into tiles"


def test_pixels_without_a_fixed_range(tmp_path: Path, photo: Image.Image) -> None:
    path = saved(photo.convert("F"), tmp_path / "image.tif", "TIFF")
    assert "floating-point" in refused(path)
    saved(Image.fromarray(np.full((2, 2), 70_000, np.int32)), path, "TIFF")
    assert "more than 16 bits" in refused(path)


@pytest.mark.real_data
def test_real_photos_decode(real_data: Path) -> None:
    paths = sorted((real_data / "hymenoptera_256" / "val").rglob("*.jpg"))[::8]
    assert paths
    for path in paths:
        with Image.open(path) as opened:
            # Decoders differ where they interpolate color; on the whole the images are the same.
            gap = np.abs(decode_image(path).astype(int) - np.asarray(opened.convert("RGB"), int))
        assert gap.mean() < 1
