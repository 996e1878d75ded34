"""Samples as the records of a pack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.batch import Sample
from paceline.data.loading.source import Dataset
from paceline.data.packs.pack_format import (
    ARRAY_BYTES,
    RECORD_BYTES,
    ArrayField,
    Header,
    Joints,
    align,
    checksum,
    number_of,
    shape_of,
)

Shapes = dict[str, tuple[int, ...]]


class Record(NamedTuple):
    """A sample as it is written."""

    row: bytes
    data: bytes
    shapes: Shapes


def describe(dataset: Dataset, first: Sample, size: int | list[int] | None) -> Header:
    """The header for samples like the first one; what is known only at the end is left at 0."""
    arrays: dict[str, ArrayField] = {}
    numbers = {}
    for name, value in first.items():
        array = np.asarray(value)
        if array.dtype.kind not in "buif":
            raise DataError(f"a pack holds numbers and arrays of them, but {name!r} of the first sample is {value!r}")
        if array.ndim:
            arrays[name] = ArrayField.model_validate({"dtype": array.dtype.name, "dims": array.ndim})
        else:
            numbers[name] = "float64" if array.dtype.kind == "f" else "int64"
    return Header.model_validate(
        {
            "classes": list(dataset.classes),
            "channels": dataset.channels,
            "joints": _joints(dataset),
            "size": size,
            "arrays": dict(sorted(arrays.items(), key=lambda item: (item[0] != "image", item[0]))),
            "numbers": numbers,
            "even": False,
            "room": len(dataset),
            **dict.fromkeys(["samples", "records_end", "left_out_bytes", "left_out_crc"], 0),
        }
    )


def serialise(header: Header, row_type: np.dtype[np.void], number: int, begin: int, sample: Sample) -> Record:
    """Sample `number` as a record that begins at this byte of the file, and its row of the index."""
    _check_fields(header, number, sample)
    row: NDArray[np.void] = np.zeros(1, row_type)
    row["begin"] = begin
    parts: list[bytes] = []
    shapes: Shapes = {}
    end = 0
    for name in header.arrays:
        array = np.asarray(sample[name])
        row[shape_of(name)] = shapes[name] = array.shape
        padding = align(end, ARRAY_BYTES) - end
        parts += [bytes(padding), array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()]
        end += padding + array.nbytes
    for name in header.numbers:
        row[number_of(name)] = sample[name]
    parts.append(bytes(align(end, RECORD_BYTES) - end))
    data = b"".join(parts)
    row["crc"] = checksum(number, row, data)
    return Record(row.tobytes(), data, shapes)


def _check_fields(header: Header, number: int, sample: Sample) -> None:
    if sample.keys() != header.arrays.keys() | header.numbers.keys():
        wanted = ", ".join([*header.arrays, *header.numbers])
        raise DataError(f"sample {number} has the fields {', '.join(sample)}, but the first one {wanted}")
    for name in sample:
        array, field = np.asarray(sample[name]), header.arrays.get(name)
        found = (array.dtype.name, array.ndim)
        if found != ((field.dtype, field.dims) if field else (array.dtype.name, 0)):
            wanted = f"{field.dtype} in {field.dims} dimensions" if field else "one number"
            raise DataError(
                f"{name!r} of sample {number} is {found[0]} in {found[1]} dimensions, but of the first one {wanted}"
            )


def _joints(dataset: Dataset) -> Joints | None:
    joints = getattr(dataset, "joints", None)
    if joints is None:
        return None
    return Joints(names=list(joints.names), pairs=_pairs(joints.pairs), limbs=_pairs(joints.limbs))


def _pairs(values: Sequence[Any]) -> list[list[int]]:
    return [[int(first), int(second)] for first, second in values]
