import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.io.mask import PaintedClasses, decode_gray, decode_ids

IDS = np.array([[0, 1, 2], [3, 2, 0]], np.uint8)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(values: NDArray[np.uint8], depth: int, color_type: int, palette: bytes = b"") -> bytes:
    """A PNG file written by hand, so that its bits are known."""
    height, width = values.shape[:2]
    bits = np.unpackbits(values.reshape(height, -1, 1), axis=2)[:, :, 8 - depth :].reshape(height, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in np.packbits(bits, axis=1))
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    colors = chunk(b"PLTE", palette) if palette else b""
    data = chunk(b"IHDR", header) + colors + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


@pytest.mark.parametrize("depth", [2, 4, 8])
@pytest.mark.parametrize(("color_type", "palette"), [(0, b""), (3, bytes(range(100, 112)))])
def test_ids_are_as_stored_whatever_their_bits(tmp_path: Path, depth: int, color_type: int, palette: bytes) -> None:
    path = tmp_path / "mask.png"
    path.write_bytes(png(IDS, depth, color_type, palette))
    assert decode_ids(path).tolist() == IDS.tolist()
    assert decode_ids(path).dtype == np.uint8


@settings(max_examples=30, deadline=None)
@given(depth=st.sampled_from([1, 2, 4, 8]), width=st.integers(1, 9), seed=st.integers(0, 99))
def test_ids_of_any_width(tmp_path_factory: pytest.TempPathFactory, depth: int, width: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**depth, (3, width), dtype=np.uint8)
    path = tmp_path_factory.mktemp("mask") / "mask.png"
    path.write_bytes(png(values, depth, 0))
    assert decode_ids(path).tolist() == values.tolist()


def test_ids_of_other_formats(tmp_path: Path) -> None:
    for suffix in ("bmp", "gif", "tif"):
        Image.fromarray(IDS).save(tmp_path / f"mask.{suffix}")
        assert decode_ids(tmp_path / f"mask.{suffix}").tolist() == IDS.tolist()


def tiff(values: list[int], bits: int, shades: int = 1) -> bytes:
    """A TIFF file of one row of gray, written by hand."""
    row = np.packbits(np.unpackbits(np.array(values, np.uint8)[:, None], axis=1)[:, 8 - bits :]).tobytes()
    tags = {256: len(values), 257: 1, 258: bits, 259: 1, 262: shades, 273: 122, 277: 1, 278: 1, 279: len(row)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + row


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_ids_of_tiff_files_of_few_bits(tmp_path: Path, bits: int) -> None:
    values = [0, 1, 1, 0] if bits == 1 else [0, 1, 2, 3]
    (tmp_path / "mask.tif").write_bytes(tiff(values, bits))
    assert decode_ids(tmp_path / "mask.tif").tolist() == [values]


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (tiff([0, 1, 2, 3], 8, shades=0), r"0 is white \(WhiteIsZero\)"),
        (tiff([0, 1, 2, 3], 4, shades=0), r"0 is white \(WhiteIsZero\)"),
        (
            struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 58, 0, 0, 54, 40, 2, 1, 1, 16, 0, 4, 0, 0, 0, 0) + b"\0\0\x21\4",
            "a BMP file of 16 bits a pixel",
        ),
    ],
)
def test_ids_are_refused_where_greys_are_scaled(tmp_path: Path, content: bytes, reported: str) -> None:
    path = tmp_path / "mask.tif"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"mask\.tif: .*{reported}.*; save it as an 8-bit PNG file"):
        decode_ids(path)


def test_a_format_of_scaled_greys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mask.pgm"
    path.write_bytes(b"P5 3 1 100 \0\x64\x14")
    for decode in (decode_ids, decode_gray):
        with pytest.raises(DataError, match=r"mask\.pgm: .*no mask .*; expected PNG, BMP, GIF, TIFF"):
            decode(path)


def test_grey_spans_0_to_255(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    gray = np.array([[0, 90, 255]], np.uint8)
    for image in (Image.fromarray(gray), Image.fromarray(gray).convert("RGB"), Image.fromarray(gray).convert("LA")):
        image.save(path)
        assert decode_gray(path).tolist() == gray.tolist()
    path.write_bytes(png(np.array([[0, 1, 1]], np.uint8), 1, 0))
    assert decode_gray(path).tolist() == [[0, 255, 255]]
    path.write_bytes(png(np.array([[0, 1, 1]], np.uint8), 8, 3, bytes([0, 0, 0, 255, 255, 255])))
    assert decode_gray(path).tolist() == [[0, 255, 255]]
    Image.fromarray(np.full((8, 8), 200, np.uint8)).save(tmp_path / "mask.jpg")
    assert decode_gray(tmp_path / "mask.jpg").tolist() == [[200] * 8] * 8


def save(mode: str, suffix: str = "png") -> Callable[[Path], Path]:
    def saved(folder: Path) -> Path:
        path = folder / f"mask.{suffix}"
        Image.new(mode, (4, 3)).save(path)
        return path

    return saved


def written(content: bytes) -> Callable[[Path], Path]:
    def saved(folder: Path) -> Path:
        (folder / "mask.png").write_bytes(content)
        return folder / "mask.png"

    return saved


HUGE = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0))
WHOLE = png(np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8), 8, 0)


@pytest.mark.parametrize(
    ("make", "of_ids", "of_grey"),
    [
        (save("F", "tif"), "floating-point numbers; save the mask with one id a pixel", "floating-point numbers"),
        (save("L", "jpg"), "a JPEG file, which does not keep class ids exactly; save masks as PNG", None),
        (written(b""), "the file is empty", "the file is empty"),
        (written(b"GIF87a but no image"), "damaged|not an image", "damaged|not an image"),
        (written(b"text"), "not an image that can be read", "not an image that can be read"),
        (written(WHOLE[:800]), "damaged or truncated", "damaged or truncated"),
        (
            written(HUGE + chunk(b"IDAT", b"") + chunk(b"IEND", b"")),
            "more than 178,956,970 pixels",
            "more than 178,956,970",
        ),
        (lambda folder: folder / "absent.png", "no such file", "no such file"),
    ],
)
def test_what_is_no_mask(tmp_path: Path, make: Callable[[Path], Path], of_ids: str, of_grey: str | None) -> None:
    path = make(tmp_path)
    with pytest.raises(DataError, match=of_ids) as caught:
        decode_ids(path)
    assert str(caught.value).startswith(f"{path}: ")
    if of_grey is None:
        assert decode_gray(path).shape == (3, 4)
    else:
        with pytest.raises(DataError, match=of_grey):
            decode_gray(path)


# --- grays, alpha channels and colors ----------------------------------------------------------------------


def saved_channels(folder: Path, *channels: list[int]) -> Path:
    """A row of pixels: gray and alpha, red, green and blue, or these and alpha."""
    mode = {2: "LA", 3: "RGB", 4: "RGBA"}[len(channels)]
    Image.fromarray(np.array([channels], np.uint8).transpose(0, 2, 1).copy(), mode).save(folder / "mask.png")
    return folder / "mask.png"


def test_ids_saved_as_equal_channels_are_ids(tmp_path: Path) -> None:
    ids = [0, 1, 7]
    assert decode_ids(saved_channels(tmp_path, ids, ids, ids)).tolist() == [ids]
    assert decode_ids(saved_channels(tmp_path, ids, ids, ids, [255] * 3)).tolist() == [ids]
    assert decode_ids(saved_channels(tmp_path, ids, [255] * 3)).tolist() == [ids]
    assert decode_ids(saved_channels(tmp_path, ids, ids, ids, [0, 255, 255])).tolist() == [ids], "ground not painted"
    path = saved_channels(tmp_path, ids, ids, [0, 1, 6])
    advice = r"not an id of a class; give the color of each class as `colors`, or save the mask with one id a pixel"
    with pytest.raises(DataError, match=rf"mask\.png: pixel \(2, 0\) has the color \[7, 7, 6\], {advice}"):
        decode_ids(path)


@pytest.mark.parametrize("values", [[255] * 3, [0] * 3, [1, 1, 0]])
def test_ids_are_not_looked_for_in_an_alpha_channel(tmp_path: Path, values: list[int]) -> None:
    path = saved_channels(tmp_path, values, values, values, [0, 255, 255])
    with pytest.raises(DataError, match=r"the mask seems to be in it; save it with one id a pixel, .*without transp"):
        decode_ids(path)


def test_ids_of_16_bits(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    Image.fromarray(np.array([[0, 3, 255]], np.uint16)).save(path)
    assert decode_ids(path).tolist() == [[0, 3, 255]]
    assert decode_ids(path).dtype == np.uint8
    with pytest.raises(DataError, match=r"16 bits or more a channel; save masks with 8 bits"):
        decode_gray(path)
    Image.fromarray(np.array([[0, 3, 26_001]], np.uint16)).save(path)
    with pytest.raises(DataError, match=r"holds the id 26001, expected 0 to 255; map ids to classes with `label_map`"):
        decode_ids(path)
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    pixel = chunk(b"IDAT", zlib.compress(b"\0" + b"\0\x01" * 3))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixel + chunk(b"IEND", b""))
    with pytest.raises(DataError, match="16 bits or more a channel; save the mask with one id a pixel"):
        decode_ids(path)


@pytest.mark.parametrize(
    ("gray", "alpha", "expected"),
    [
        ([255, 255, 255], [0, 255, 99], [0, 255, 99]),  # white, and the object in alpha
        ([0, 255, 255], [0, 255, 99], [0, 255, 99]),  # the same, with nothing stored where nothing is seen
        ([255, 255, 255], [0, 0, 0], [0, 0, 0]),  # the same without an object
        ([255, 255, 255], [255, 255, 255], [255, 255, 255]),
        ([0, 255, 99], [255, 255, 255], [0, 255, 99]),
        ([0, 255, 99], [0, 0, 0], [0, 255, 99]),  # a channel that nobody has filled
        ([0, 255, 99], [0, 255, 255], [0, 255, 99]),
        ([0, 255, 99], [0, 255, 99], [0, 255, 99]),
    ],
)
def test_grey_and_alpha(tmp_path: Path, gray: list[int], alpha: list[int], expected: list[int]) -> None:
    assert decode_gray(saved_channels(tmp_path, gray, gray, gray, alpha)).tolist() == [expected]
    assert decode_gray(saved_channels(tmp_path, gray, alpha)).tolist() == [expected]


@pytest.mark.parametrize(("gray", "alpha"), [([0, 0, 0], [0, 255, 99]), ([40, 255, 99], [0, 255, 255])])
def test_grey_and_alpha_of_which_either_may_be_the_mask(tmp_path: Path, gray: list[int], alpha: list[int]) -> None:
    with pytest.raises(DataError, match=r"mask\.png: its transparency \(alpha channel\) .*save it as 8-bit gray"):
        decode_gray(saved_channels(tmp_path, gray, gray, gray, alpha))


def test_a_photo_that_is_cut_out_is_no_mask(tmp_path: Path) -> None:
    path = saved_channels(tmp_path, [0, 9, 9], [0, 8, 8], [0, 7, 7], [0, 255, 255])
    with pytest.raises(DataError, match=r"has the color \[9, 8, 7\]; .* save it so, or the alpha channel alone"):
        decode_gray(path)


COLORS = [[0, 0, 0], [128, 64, 128], [255, 0, 1]]


def test_colors_stand_for_classes(tmp_path: Path) -> None:
    painted = PaintedClasses(COLORS)
    path = saved_channels(tmp_path, [255, 0, 128, 0], [0, 0, 64, 0], [1, 0, 128, 0])
    assert decode_ids(path, mapped=painted).tolist() == [[2, 0, 1, 0]]
    assert decode_ids(path, mapped=painted).dtype == np.uint8
    with Image.open(path) as image:
        image.quantize(4).save(path)
    assert decode_ids(path, mapped=painted).tolist() == [[2, 0, 1, 0]], "a palette"
    Image.new("I;16", (2, 2)).save(path)
    with pytest.raises(DataError, match="16 bits or more a channel"):
        decode_ids(path, mapped=painted)


def test_colors_of_no_class(tmp_path: Path) -> None:
    pixels = np.zeros((5, 4, 3), np.uint8)
    for column, color in enumerate([[1, 2, 3], [128, 64, 128], [9, 9, 9], [7, 7, 7]]):
        pixels[1 + column :, column] = color
    Image.fromarray(pixels).save(tmp_path / "mask.png")
    named = r"\[1, 2, 3\] \(20 % of the pixels\), \[9, 9, 9\] \(10 % of the pixels\), \[7, 7, 7\] \(5 % of the pixels\)"
    with pytest.raises(DataError, match=rf"mask\.png: has {named}, of none of `colors`; add their classes, or set `ig"):
        decode_ids(tmp_path / "mask.png", mapped=PaintedClasses(COLORS))
    found = decode_ids(tmp_path / "mask.png", mapped=PaintedClasses(COLORS, ignore_index=255))
    assert found.tolist() == [[0] * 4, [255, 0, 0, 0], [255, 1, 0, 0], [255, 1, 255, 0], [255, 1, 255, 255]]
    with pytest.raises(DataError, match=r"\[128, 64, 128\] \(15 % .* and 1 color more, of none"):
        decode_ids(tmp_path / "mask.png", mapped=PaintedClasses(COLORS[:1]))
