"""Which orientation is believed: the one in the Exif data of the file, wherever it lies, and nothing else."""

from __future__ import annotations

import io
import random
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.io.image import Encoded
from paceline.data.io.mask import decode_gray, decode_ids

WIDTH, HEIGHT = 6, 4
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def tags(orientation: int, order: str = "<", kind: int = 3) -> bytes:
    value = struct.pack(order + ("HH" if kind == 3 else "I"), *((orientation, 0) if kind == 3 else (orientation,)))
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HIH", 42, 8, 1)
    return head + struct.pack(order + "HHI", 0x0112, kind, 1) + value + bytes(4)


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content


def encoded(kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (WIDTH, HEIGHT)).convert("RGB" if kind in ("JPEG", "WEBP") else "L").save(stream, kind, **options)
    return stream.getvalue()


def jpeg(*segments: bytes) -> bytes:
    data = encoded("JPEG")
    return b"".join([data[:2], *segments, data[2:]])


def lies(tmp_path: Path, data: bytes) -> int:
    """The orientation of a file, whose decoded pixels, as those of a mask, agree with its size."""
    path = tmp_path / "image"
    path.write_bytes(data)
    image = Encoded.read(path)
    size = (HEIGHT, WIDTH) if image.orientation < 5 else (WIDTH, HEIGHT)
    assert (image.height, image.width) == image.decode().shape[:2] == size
    if data[8:12] != b"WEBP":
        assert decode_gray(path).shape == size
        if not data.startswith(b"\xff\xd8"):
            assert decode_ids(path).shape == size
    return image.orientation


EXIF = segment(0xE1, b"Exif\0\0" + tags(6))
JPEGS = {
    "a comment that looks like it": (jpeg(segment(0xFE, b"Exif\0\0" + tags(6))), 1),
    "a comment before it": (jpeg(segment(0xFE, b"Exif\0\0" + tags(8)), EXIF), 6),
    "another application": (jpeg(segment(0xE2, b"Exif\0\0" + tags(6))), 1),
    "behind 256 KiB of profiles": (jpeg(*[segment(0xE2, bytes(65_000))] * 4, EXIF), 6),
    "after XMP": (
        jpeg(segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + XMP), segment(0xE1, b"Exif\0\0" + tags(3))),
        3,
    ),
    "XMP alone": (jpeg(segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + XMP)), 1),
    "filled with bytes of ones": (jpeg(b"\xff" * 9 + EXIF), 6),
    "a thumbnail's own": (jpeg(segment(0xE0, jpeg(EXIF)), EXIF.replace(tags(6), tags(3))), 3),
    "the first of two": (jpeg(EXIF, segment(0xE1, b"Exif\0\0" + tags(3))), 6),
    "numbers of 4 bytes": (jpeg(segment(0xE1, b"Exif\0\0" + tags(6, ">", 4))), 6),
    "a number that means nothing": (jpeg(segment(0xE1, b"Exif\0\0" + tags(9))), 1),
}


@pytest.mark.parametrize("name", JPEGS)
def test_jpeg(tmp_path: Path, name: str) -> None:
    data, expected = JPEGS[name]
    assert lies(tmp_path, data) == expected


def test_exif_behind_the_pixels_of_a_jpeg_is_not_its_own(tmp_path: Path) -> None:
    assert lies(tmp_path, encoded("JPEG") + EXIF) == 1


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", 0)


def test_png(tmp_path: Path) -> None:
    plain, note = encoded("PNG"), Image.Exif()
    note[0x0112] = 6
    turned = encoded("PNG", exif=note)
    assert lies(tmp_path, turned) == 6
    start, end = turned.index(b"eXIf") - 4, turned.index(b"IDAT") - 4
    moved = turned[:start] + turned[end:-12] + turned[start:end] + turned[-12:]
    assert lies(tmp_path, moved) == 6, "it may come behind the pixels"
    text = b"XML:com.adobe.xmp" + bytes(5) + XMP
    for name in (b"iTXt", b"tEXt"):
        part = struct.pack(">I", len(text)) + name + text + struct.pack(">I", zlib.crc32(name + text))
        assert lies(tmp_path, plain[:33] + part + plain[33:]) == 1
        assert lies(tmp_path, plain[:-12] + part + plain[-12:]) == 1


@pytest.mark.parametrize("kind", ["WEBP", "TIFF"])
def test_other_formats_believe_exif_and_not_xmp(tmp_path: Path, kind: str) -> None:
    note = Image.Exif()
    note[0x0112] = 6
    xmp = {"xmp": XMP} if kind == "WEBP" else {"tiffinfo": {700: XMP}}
    assert lies(tmp_path, encoded(kind, exif=note)) == 6
    assert lies(tmp_path, encoded(kind, **xmp)) == 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_what_is_cut_or_spoilt_turns_nothing_or_is_refused(tmp_path: Path, kind: str) -> None:
    note = Image.Exif()
    note[0x0112] = 6
    data, draws = encoded(kind, exif=note), random.Random(0)
    cases = [data[:length] for length in range(1, len(data))]
    for _ in range(1_000):
        spoilt = bytearray(data)
        for _ in range(3):
            spoilt[draws.randrange(len(data))] = draws.choice((0, 1, 127, 255, draws.randrange(256)))
        cases.append(bytes(spoilt))
    for case in cases:
        (tmp_path / "image").write_bytes(case)
        with suppress(DataError):
            assert Encoded.read(tmp_path / "image").orientation in range(1, 9)


def test_a_truncated_png_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded("PNG")[:-20])
    with pytest.raises(DataError, match=r"a\.png: damaged or truncated"):
        Encoded.read(tmp_path / "a.png").decode()
