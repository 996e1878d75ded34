"""The file format of packs: what comes where, and the checksums that cover every byte.

A pack is, in this order: a preamble (magic, length and CRC-32 of the header); the header, JSON padded with spaces; the
index, a row a sample, with room for as many as there might have been; the records, the arrays of a sample one behind
the other; and a list of what was left out, JSON again. Everything is little-endian, nothing is pickled. The checksum of
a sample covers its number, its row and its record.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PlainValidator

MAGIC = b"paceline pack\r\n\0"
PREAMBLE = struct.Struct("<16sII")
RECORD_BYTES = 64
"""Records begin at multiples of this."""
ARRAY_BYTES = 8
"""The arrays of a record begin at multiples of this."""
MAX_HEADER_BYTES = 1 << 28
_COUNT_DIGITS = 20

Whole = Annotated[int, Field(ge=0)]


def _is_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {value!r}")  # noqa: TRY004 - pydantic takes no TypeError
    return value


# Names of folders may be no UTF-8, which pydantic's own texts have to be.
Text = Annotated[str, PlainValidator(_is_text)]


class ArrayField(BaseModel):
    """A field whose values are arrays, of any shape with this many dimensions."""

    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: Literal["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool"]
    dims: Annotated[int, Field(ge=0, le=8)]


class Keypoints(BaseModel):
    """Names of keypoints, as data sets give them."""

    model_config = ConfigDict(strict=True, extra="forbid")

    names: list[Text]
    pairs: list[list[int]]
    limbs: list[list[int]]


class Header(BaseModel):
    """What is said once about all samples of a pack."""

    model_config = ConfigDict(strict=True, extra="forbid")

    version: Literal[1] = 1
    classes: list[Text]
    channels: Annotated[int, Field(ge=1)]
    joints: Keypoints | None
    size: int | list[int] | None
    """What images were resized to: their shorter side, height and width, or nothing."""
    arrays: dict[str, ArrayField]
    numbers: dict[str, Literal["int64", "float64"]]
    even: bool
    """Whether all samples have the same shapes."""
    room: Whole
    """Rows that the index has room for."""
    samples: Whole
    records_end: Whole
    """Where the list of what was left out begins."""
    left_out_bytes: Whole
    left_out_crc: Whole

    def encode(self, length: int | None = None) -> bytes:
        """The header as JSON, padded to `length`; without one, to what leaves room for any counts."""
        text = json.dumps(self.model_dump(), separators=(",", ":")).encode()
        if length is None:
            length = -(PREAMBLE.size + len(text) + 5 * _COUNT_DIGITS) % RECORD_BYTES + len(text) + 5 * _COUNT_DIGITS
        return text.ljust(length)

    def row_type(self) -> np.dtype[np.void]:
        """The layout of a row of the index, without holes: copies need not keep what is in them."""
        numbers = [(number_of(name), np.dtype(kind).newbyteorder("<")) for name, kind in self.numbers.items()]
        shapes = [(shape_of(name), "<u4", (field.dims,)) for name, field in self.arrays.items()]
        words = 1 + sum(field.dims for field in self.arrays.values())
        return np.dtype([("begin", "<u8"), *numbers, ("crc", "<u4"), *shapes, ("unused", "<u4", (words % 2,))])


def shape_of(name: str) -> str:
    """The column of the index with the shape of an array."""
    return f"shape {name}"


def number_of(name: str) -> str:
    """The column of the index with a field that is one number a sample."""
    return f"number {name}"


def records_begin(header_bytes: int, room: int, row_bytes: int) -> int:
    """Where the first record is."""
    return align(PREAMBLE.size + header_bytes + room * row_bytes, RECORD_BYTES)


def align(position: int, multiple: int) -> int:
    """The first multiple that is not before a position."""
    return -(-position // multiple) * multiple


def record_bytes(arrays: dict[str, ArrayField], shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, int], int]:
    """Where each array of a record begins, and the length of the record."""
    places, end = {}, 0
    for name, field in arrays.items():
        places[name] = align(end, ARRAY_BYTES)
        end = places[name] + math.prod(shapes[name]) * np.dtype(field.dtype).itemsize
    return places, align(end, RECORD_BYTES)


def checksum(index: int, row: NDArray[Any], record: bytes | memoryview) -> int:
    """The CRC-32 of a sample: its number, its row [1] without the checksum, and its record."""
    bare = row.copy()
    bare["crc"] = 0
    return zlib.crc32(record, zlib.crc32(bare.tobytes(), zlib.crc32(index.to_bytes(8, "little"))))
