"""Records: a dict of arrays and numbers as one piece of memory that describes itself.

A record holds the length of its description, the description as JSON, and its arrays, each at a multiple of 64 bytes.
Packs hold samples so; reading one copies nothing.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_ALIGNMENT = 64


class Field(NamedTuple):
    """A field of a record: an array at a place in it, or a number if it has no shape."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    start: int


def record_pieces(fields: Mapping[str, Any]) -> list[memoryview]:
    """A record as pieces of memory, to be laid one behind the other: what is in it, then its arrays as they are."""
    described, arrays = [], []
    for name, value in fields.items():
        is_array = isinstance(value, np.ndarray)
        array = np.asarray(value.item() if isinstance(value, np.generic) else value)
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        arrays.append(array)
        described.append([name, array.dtype.str, list(value.shape) if is_array else None])
    text = json.dumps(described).encode()
    pieces = []
    for content in (np.frombuffer(struct.pack("<Q", len(text)) + text, np.uint8), *arrays):
        pieces.append(memoryview(content.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
        pieces.append(memoryview(bytes(_aligned(content.nbytes) - content.nbytes)))
    return pieces


def record_fields(memory: Any, start: int) -> tuple[Field, ...]:
    """What the record that begins there holds; places are counted from its beginning."""
    (length,) = struct.unpack_from("<Q", memory, start)
    return _described(bytes(memory[start + 8 : start + 8 + length]))


@lru_cache(maxsize=4096)
def _described(text: bytes) -> tuple[Field, ...]:
    fields, start = [], _aligned(8 + len(text))
    for name, dtype, held in json.loads(text):
        shape = None if held is None else tuple(held)
        fields.append(Field(name, dtype, shape, start))
        start += _aligned(math.prod(shape or ()) * np.dtype(dtype).itemsize)
    return tuple(fields)


def read_record(memory: Any, start: int) -> dict[str, Any]:
    """The record that begins there; its arrays are the memory itself and may not be written to."""
    record: dict[str, Any] = {}
    for name, dtype, shape, place in record_fields(memory, start):
        array: Array = np.ndarray(shape or (), dtype, memory, start + place)
        array.flags.writeable = False
        record[name] = array.item() if shape is None else array
    return record


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
