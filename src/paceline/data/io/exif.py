"""How an image lies, by the Exif data of its file, which is found by the structure of the format, not by a search."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Literal

_JPEG, _PNG, _EXIF = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"Exif\0\0"
_ORIENTATION = 0x0112
_KINDS = {3: "H", 4: "I"}  # how the number of a tag is stored
_MARKER = re.compile(rb"\xff([^\xff])")
_APP1, _START_OF_SCAN, _END = 0xE1, 0xDA, 0xD9
_WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD9)}
_MAX_PARTS = 1 << 16  # of a file, or one of nothing but empty parts would take minutes


def exif_orientation(data: bytes) -> int:
    """The Exif orientation of a JPEG, PNG or WebP file, 1 to 8; 1, upright, if there is none or it is damaged."""
    file = memoryview(data)
    if data.startswith(_JPEG):
        parts = _jpeg_segments(data)
    elif data.startswith(_PNG):
        parts = _chunks(file[8:], "big", b"eXIf")
    elif data[8:12] == b"WEBP":
        parts = _chunks(file[12 : 8 + int.from_bytes(file[4:8], "little")], "little", b"EXIF")
    else:
        return 1
    try:
        return next(map(_read_orientation, parts), 1)
    except struct.error:
        return 1


def _jpeg_segments(data: bytes) -> Iterator[memoryview]:
    """The Exif segments before the pixels of a JPEG file."""
    place = 2
    for _ in range(_MAX_PARTS):
        found = _MARKER.search(data, place)  # decoders pass over what is no marker, too
        if found is None or found[1][0] in (_START_OF_SCAN, _END):
            return
        place = found.end()
        if found[1][0] in _WITHOUT_LENGTH:
            continue
        size = int.from_bytes(data[place : place + 2], "big")
        if found[1][0] == _APP1 and data.startswith(_EXIF, place + 2):
            yield memoryview(data)[place + 2 : place + size]
        place += size


def _chunks(data: memoryview, byteorder: Literal["big", "little"], name: bytes) -> Iterator[memoryview]:
    """The chunks of this name in a PNG file, which is big-endian, or a WebP file, which is not."""
    size_at, name_at = (0, 4) if byteorder == "big" else (4, 0)
    start = 0
    for _ in range(_MAX_PARTS):
        if start + 8 > len(data):
            return
        size = int.from_bytes(data[start + size_at :][:4], byteorder)
        if data[start + name_at :][:4] == name:
            yield data[start + 8 : start + 8 + size]
        start += 8 + size + (4 if byteorder == "big" else size % 2)  # a checksum, or padding


def _read_orientation(tags: memoryview) -> int:
    """The orientation among tags, which are those of a TIFF file."""
    if tags[:6] == _EXIF:
        tags = tags[6:]
    order = {b"II": "<", b"MM": ">"}.get(bytes(tags[:2]))
    if order is None:
        return 1
    (directory,) = struct.unpack_from(order + "I", tags, 4)
    (count,) = struct.unpack_from(order + "H", tags, directory)
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind = struct.unpack_from(order + "HH", tags, entry)
        if tag == _ORIENTATION and kind in _KINDS:
            (value,) = struct.unpack_from(order + _KINDS[kind], tags, entry + 8)
            return int(value) if 1 <= value <= 8 else 1
    return 1
