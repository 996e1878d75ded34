"""Records: a dict of arrays and numbers as one piece of memory that describes itself.

A record holds the length of its description, the description as JSON, and its arrays, each at a multiple of 64 bytes.
Packs and the memory cache hold samples so; reading one copies nothing.
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

from paceline.core.mapped_arrays import aligned

Array = NDArray[Any]


class Field(NamedTuple):
    """A field of a record: an array at a place in it, a number if it has no shape, or JSON if it has no type."""

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    start: int
    text: str = ""


def record_pieces(fields: Mapping[str, Any]) -> list[memoryview]:
    """A record as pieces of memory, to be laid one behind the other: what is in it, then its arrays as they are."""
    described: list[list[Any]] = []
    arrays: list[Array] = []
    for name, value in fields.items():
        is_array = isinstance(value, np.ndarray)
        array = np.asarray(value.item() if isinstance(value, np.generic) else value) if _is_number(value) else value
        if is_array or (isinstance(array, np.ndarray) and array.dtype != object):
            dtype = array.dtype.newbyteorder("<")
            arrays.append(np.ascontiguousarray(array, dtype))
            described.append([name, dtype.str, list(array.shape) if is_array else None])
        else:
            described.append([name, None, json.dumps(value)])
    text = json.dumps(described).encode()
    pieces = []
    for content in (np.frombuffer(struct.pack("<Q", len(text)) + text, np.uint8), *arrays):
        pieces.append(memoryview(content.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
        pieces.append(memoryview(bytes(aligned(content.nbytes) - content.nbytes)))
    return pieces


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.generic)


def record_fields(memory: Any, start: int) -> tuple[Field, ...]:
    """What the record that begins there holds; places are counted from its beginning."""
    (length,) = struct.unpack_from("<Q", memory, start)
    return _described(bytes(memory[start + 8 : start + 8 + length]))


@lru_cache(maxsize=4096)
def _described(text: bytes) -> tuple[Field, ...]:
    fields, start = [], aligned(8 + len(text))
    for name, dtype, held in json.loads(text):
        if dtype is None:
            fields.append(Field(name, None, None, start, held))
            continue
        shape = None if held is None else tuple(held)
        fields.append(Field(name, dtype, shape, start))
        start += aligned(math.prod(shape or ()) * np.dtype(dtype).itemsize)
    return tuple(fields)


def read_record(memory: Any, start: int) -> dict[str, Any]:
    """The record that begins there; its arrays are the memory itself and may not be written to."""
    record: dict[str, Any] = {}
    for name, dtype, shape, place, text in record_fields(memory, start):
        if dtype is None:
            record[name] = json.loads(text)
            continue
        array: Array = np.ndarray(shape or (), dtype, memory, start + place)
        array.flags.writeable = False
        record[name] = array.item() if shape is None else array
    return record
