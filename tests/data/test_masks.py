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
from paceline.data.reading.masks import decode_grey, decode_ids

IDS = np.array([[0, 1, 2], [3, 2, 0]], np.uint8)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(values: NDArray[np.uint8], depth: int, colour_type: int, palette: bytes = b"") -> bytes:
    """A PNG file written by hand, so that its bits are known."""
    height, width = values.shape[:2]
    bits = np.unpackbits(values.reshape(height, -1, 1), axis=2)[:, :, 8 - depth :].reshape(height, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in np.packbits(bits, axis=1))
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    colours = chunk(b"PLTE", palette) if palette else b""
    data = chunk(b"IHDR", header) + colours + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


@pytest.mark.parametrize("depth", [2, 4, 8])
@pytest.mark.parametrize(("colour_type", "palette"), [(0, b""), (3, bytes(range(100, 112)))])
def test_ids_are_as_stored_whatever_their_bits(tmp_path: Path, depth: int, colour_type: int, palette: bytes) -> None:
    path = tmp_path / "mask.png"
    path.write_bytes(png(IDS, depth, colour_type, palette))
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
    for ending in ("bmp", "gif", "tif", "pgm"):
        Image.fromarray(IDS).save(tmp_path / f"mask.{ending}")
        assert decode_ids(tmp_path / f"mask.{ending}").tolist() == IDS.tolist()


def test_grey_spans_0_to_255(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    grey = np.array([[0, 90, 255]], np.uint8)
    for image in (Image.fromarray(grey), Image.fromarray(grey).convert("RGB"), Image.fromarray(grey).convert("LA")):
        image.save(path)
        assert decode_grey(path).tolist() == grey.tolist()
    path.write_bytes(png(np.array([[0, 1, 1]], np.uint8), 1, 0))
    assert decode_grey(path).tolist() == [[0, 255, 255]]
    path.write_bytes(png(np.array([[0, 1, 1]], np.uint8), 8, 3, bytes([0, 0, 0, 255, 255, 255])))
    assert decode_grey(path).tolist() == [[0, 255, 255]]
    Image.fromarray(np.full((8, 8), 200, np.uint8)).save(tmp_path / "mask.jpg")
    assert decode_grey(tmp_path / "mask.jpg").tolist() == [[200] * 8] * 8


def save(mode: str, ending: str = "png") -> Callable[[Path], Path]:
    def saved(folder: Path) -> Path:
        path = folder / f"mask.{ending}"
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
        (save("I;16"), "16 bits or more a pixel, not a mask of class ids; expected one id a pixel", "16 bits or more"),
        (save("F", "tif"), "floating-point numbers", "floating-point numbers"),
        (save("RGB"), r"colours \(RGB\), not a mask of class ids", None),
        (save("RGBA"), r"colours \(RGBA\)", None),
        (save("LA"), "grey with transparency", None),
        (save("L", "jpg"), "a JPEG file, which does not keep class ids exactly; save masks as PNG", None),
        (written(b""), "the file is empty", "the file is empty"),
        (written(b"GIF87a but no image"), "damaged|not an image", "damaged|not an image"),
        (written(b"text"), "not an image that can be read", "not an image that can be read"),
        (written(WHOLE[:800]), "damaged or truncated", "damaged or truncated"),
        (
            written(HUGE + chunk(b"IDAT", b"") + chunk(b"IEND", b"")),
            "more than 100,000,000 pixels",
            "more than 100,000,000",
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
        assert decode_grey(path).shape == (3, 4)
    else:
        with pytest.raises(DataError, match=of_grey):
            decode_grey(path)
