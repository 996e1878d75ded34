"""Named arrays in a file: what is written is read, narrow, shared, and no damage goes unnoticed."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import DamagedFileError, DataError
from paceline.data.mapped_arrays import ArrayWriter, MappedArrays


def write(path: Path, build: object) -> MappedArrays:
    writer = ArrayWriter()
    build(writer)  # type: ignore[operator]
    with path.open("w+b") as file:
        writer.write(file)
    return MappedArrays(path)


@pytest.fixture
def names(tmp_path: Path) -> MappedArrays:
    def build(writer: ArrayWriter) -> None:
        writer.append_texts("name", [b"b.jpg", "ä a.jpg".encode()])
        writer.append("length", np.array([5, 7]))

    return write(tmp_path / "names", build)


@settings(max_examples=40)
@given(
    texts=st.lists(st.binary(max_size=300), max_size=200),
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50),
    rows=st.lists(st.lists(st.integers(0, 70_000), max_size=5), max_size=150),
    cut=st.integers(0, 200),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[bytes],
    numbers: list[int],
    rows: list[list[int]],
    cut: int,
) -> None:
    def build(writer: ArrayWriter) -> None:
        for some in (numbers[:cut], numbers[cut:]):
            writer.append("number", np.array(some, np.int64))
        for part in (texts[:cut], texts[cut:]):
            writer.append_texts("text", part)
        for these in (rows[:cut], rows[cut:]):
            values = np.array([value for row in these for value in row], np.int32)
            writer.append_rows("row", [len(row) for row in these], values)
        writer.append("share", np.array([0.25, -1e300]))
        writer.append("table", np.arange(6).reshape(3, 2))
        writer.facts["answer"] = 42

    arrays = write(tmp_path_factory.mktemp("arrays") / "file", build)
    assert arrays.facts == {"answer": 42}
    assert list(arrays.rows("text").texts()) == texts
    assert arrays["number"].tolist() == numbers
    assert [arrays.rows("row")[row].tolist() for row in range(len(rows))] == rows
    assert arrays["share"].tolist() == [0.25, -1e300]
    assert arrays["table"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert "table" in arrays
    assert "chair" not in arrays


def test_arrays_are_as_narrow_as_their_numbers(tmp_path: Path) -> None:
    largest = {"u1": 255, "u2": 256, "u4": 2**16, "u8": 2**32}

    def build(writer: ArrayWriter) -> None:
        for kind, most in largest.items():
            writer.append(kind, np.array([0, most], np.int64))
        writer.append("i1", np.array([-1, 3], np.int64))

    arrays = write(tmp_path / "file", build)
    assert {kind: arrays[kind].dtype for kind in (*largest, "i1")} == {
        kind: np.dtype(kind) for kind in (*largest, "i1")
    }


def test_arrays_cannot_be_written_to_and_rows_have_an_end(names: MappedArrays) -> None:
    with pytest.raises(ValueError, match="read-only"):
        names["length"][0] = 1
    with pytest.raises(IndexError):
        names.rows("name")[2]


def test_every_flipped_bit_and_every_cut_is_noticed(names: MappedArrays) -> None:
    whole = names.path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        names.path.write_bytes(damaged)
        with pytest.raises(DamagedFileError):
            MappedArrays(names.path)
    for content in [*(whole[:length] for length in range(0, len(whole), 7)), whole + b"\0", whole[8:]]:
        names.path.write_bytes(content)
        with pytest.raises(DamagedFileError):
            MappedArrays(names.path)


def test_a_stream_comes_before_the_arrays_and_is_not_verified(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w+b") as file:
        writer = ArrayWriter()
        file.write(bytes(range(64)))
        writer.append("number", np.array([0, 1000]))
        writer.write(file)
    assert MappedArrays(path).stream.tolist() == list(range(64))
    path.write_bytes(b"x" + path.read_bytes()[1:])
    arrays = MappedArrays(path)
    assert arrays.stream[:2].tolist() == [ord("x"), 1]
    assert arrays["number"].tolist() == [0, 1000]


def test_it_goes_to_a_worker_as_a_name(names: MappedArrays) -> None:
    sent = pickle.dumps((names, names.rows("name")))
    copied, rows = pickle.loads(sent)
    assert list(copied.rows("name").texts()) == [b"b.jpg", "ä a.jpg".encode()]
    assert rows[0].tobytes() == b"b.jpg"
    names.path.unlink()
    with pytest.raises(DataError, match="cannot be opened again"):
        pickle.loads(sent)
    write(names.path, lambda writer: writer.append("length", np.zeros(1)))
    with pytest.raises(DataError, match="was replaced while it was in use"):
        pickle.loads(sent)
    assert rows[0].tobytes() == b"b.jpg", "who has it open can go on reading"
