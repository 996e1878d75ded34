"""Records: any dict of arrays, numbers and plain values comes back as it was, without copying."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, boolean_dtypes, floating_dtypes, integer_dtypes

from paceline.data.records import read_record, record_fields, record_pieces

values = (
    arrays(integer_dtypes() | floating_dtypes() | boolean_dtypes(), array_shapes(min_dims=0, min_side=0))
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.booleans()
)


@given(first=st.dictionaries(st.text(), values), second=st.dictionaries(st.text(), values, max_size=3))
def test_what_is_written_is_read(first: dict[str, Any], second: dict[str, Any]) -> None:
    pieces = [record_pieces(fields) for fields in (first, second)]
    starts = [64, 64 + sum(map(len, pieces[0]))]
    memory = memoryview(b"\7" * 64 + b"".join(piece for each in pieces for piece in each))
    assert len(memory) % 64 == 0
    for start, fields in zip(starts, (first, second), strict=True):
        found = read_record(memory, start)
        assert list(found) == list(fields)
        for name, value in fields.items():
            assert type(found[name]) is type(value)
            np.testing.assert_array_equal(found[name], value)
            if isinstance(value, np.ndarray):
                assert found[name].dtype == value.dtype.newbyteorder("<")
                assert not found[name].flags.writeable


def test_arrays_are_the_memory_and_numbers_are_plain() -> None:
    fields = {"image": np.arange(12, dtype=np.uint8).reshape(2, 2, 3), "label": np.int32(7), "weight": np.float32(0.5)}
    memory = bytearray(b"".join(record_pieces(fields)))
    found = read_record(memory, 0)
    assert (found["label"], type(found["label"]), found["weight"], type(found["weight"])) == (7, int, 0.5, float)
    place = next(field.start for field in record_fields(memory, 0) if field.name == "image")
    assert place % 64 == 0
    memory[place] = 99
    assert found["image"][0, 0, 0] == 99
    with pytest.raises(ValueError, match="read-only"):
        found["image"][:] = 0


def test_equal_shapes_have_equal_descriptions() -> None:
    first, second = (record_pieces({"image": np.full((2, 2), value, np.uint8), "label": value}) for value in (1, 200))
    assert bytes(first[0]) == bytes(second[0])
