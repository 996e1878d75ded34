"""Images that are small on the disk and huge in memory, and what is no image."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

from chaos.hostile_files.case import CANARY, Cases
from chaos.hostile_files.commands import check_image

case = Cases()


def png(width: int, height: int, *chunks: tuple[bytes, bytes], data: bytes = b"") -> bytes:
    """A PNG that claims this size, with more chunks before its pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    all_chunks = [(b"IHDR", header), *chunks, (b"IDAT", data or zlib.compress(bytes(100))), (b"IEND", b"")]
    packed = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in all_chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def _bomb(megabytes: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(megabytes)) + packer.flush()


@case("a PNG of 50,000 × 50,000", 3)
def _() -> list[str]:
    return check_image(png(50_000, 50_000, data=_bomb(64)))


@case("a PNG whose color profile is a bomb", 3)
def _() -> list[str]:
    return check_image(png(8, 8, (b"iCCP", b"x\0\0" + _bomb(128))))


@case("a PNG whose comment is a bomb", 3)
def _() -> list[str]:
    return check_image(png(8, 8, (b"zTXt", b"x\0\0" + _bomb(128))))


@case("a PNG of a thousand comments", 3)
def _() -> list[str]:
    return check_image(png(8, 8, *[(b"zTXt", b"x\0\0" + zlib.compress(bytes(1_000_000)))] * 1000))


@case("a GIF of 65,535 × 65,535", 3)
def _() -> list[str]:
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\x02\x02\x4c\x01\0;"
    return check_image(b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0) + frame)


@case("a BMP of 60,000 × 60,000", 3)
def _() -> list[str]:
    header = struct.pack("<IiiHHIIiiII", 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0)
    return check_image(b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + header)


@case("a WebP of 16,383 × 16,383", 3)
def _() -> list[str]:
    canvas = struct.pack("<I", 16_382)[:3]
    body = b"VP8X" + struct.pack("<II", 10, 2) + canvas + canvas
    body += b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    return check_image(b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body)


def _tiff(**tags: int) -> bytes:
    numbers = {"width": 256, "height": 257, "bits": 258, "packed": 259, "colors": 262, "strip": 273, "samples": 277}
    numbers |= {"rows": 278, "strip_bytes": 279, "tile_width": 322, "tile_height": 323, "tile": 324, "tile_bytes": 325}
    entries = sorted((numbers[name], value) for name, value in tags.items())
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + bytes(4)


@case("a TIFF of 100,000 × 100,000", 3)
def _() -> list[str]:
    common = {"bits": 8, "packed": 1, "colors": 1, "samples": 1}
    return check_image(_tiff(width=100_000, height=100_000, strip=8, rows=100_000, strip_bytes=64, **common))


@case("a small TIFF with one huge tile", 3)
def _() -> list[str]:
    tags = {"bits": 8, "packed": 8, "colors": 1, "samples": 1, "width": 16, "height": 16}
    tags |= {"tile_width": 40_000, "tile_height": 40_000}
    packed = _bomb(64)
    start = len(_tiff(**tags, tile=0, tile_bytes=0))
    return check_image(_tiff(**tags, tile=start, tile_bytes=len(packed)) + packed)


def _jpeg(width: int, height: int, **options: Any) -> bytes:
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (64, 64)).save(content, "JPEG", **options)
    data = bytearray(content.getvalue())
    start = data.index(b"\xff\xc2" if options.get("progressive") else b"\xff\xc0") + 5
    data[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@case("a JPEG of 65,500 × 65,500", 3)
def _() -> list[str]:
    return check_image(_jpeg(65_500, 65_500))


@case("a JPEG that is drawn two thousand times", 3)
def _() -> list[str]:
    data = _jpeg(9_000, 9_000, progressive=True)
    start = data.index(b"\xff\xda")
    scan = data[start : data.index(b"\xff", start + 20)]
    return check_image(data[:start] + scan * 2000 + b"\xff\xd9")


@case("a PPM with a lying header", 3)
def _() -> list[str]:
    return check_image(b"P6 999999999 999999999 255\n" + bytes(64))


@case("an EPS program as .png", 3)
def _() -> list[str]:
    command = f"(%pipe%touch {CANARY.absolute()}) (w) file closefile"
    return check_image(f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n{command}\n%%EOF\n".encode())


@case("an image of two gigabytes of nothing", 3)
def _() -> list[str]:
    command = check_image(b"\xff\xd8\xff")
    os.truncate("photos/one/photo.png", 1 << 31)
    return command


@case("a pipe as an image", 3)
def _() -> list[str]:
    command = check_image()
    os.mkfifo("photos/one/photo.png")
    return command


@case("a device as an image", 3)
def _() -> list[str]:
    command = check_image(follow_links=True)
    Path("photos/one/photo.png").symlink_to("/dev/zero")
    return command


@case("a directory as an image", 3)
def _() -> list[str]:
    command = check_image()
    Path("photos/one/photo.png").mkdir()
    return command
