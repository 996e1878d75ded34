import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import DataError
from paceline.data.io import json_file
from paceline.data.io.json_file import JsonLists, json_errors, parse_piece, read_json

TEXTS = st.text('ab\\"[]{},: \u00e9', max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
ROOTS = st.dictionaries(TEXTS, VALUES | st.lists(VALUES, max_size=8), max_size=5)


def read_in_pieces(text: bytes) -> Any:
    """What JsonLists makes of a file, put together again; ValueError if any part is no JSON."""
    lists = JsonLists(io.BytesIO(text))
    if not isinstance(lists.content, dict):
        return lists.content
    found = dict(lists.content)
    for name in [name for name, value in found.items() if isinstance(value, list)]:
        found[name] = [item for piece in lists.pieces(name) for item in parse_piece(*piece)]
    return found


@given(ROOTS, st.integers(1, 60), st.sampled_from([None, 1]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_hold_what_the_file_holds(
    root: dict[str, Any], block: int, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(root, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_file, "_BLOCK", block)
        assert read_in_pieces(text) == root


@given(ROOTS, st.integers(1, 60), st.data())
@settings(max_examples=300, deadline=None)
def test_what_json_refuses_is_refused_in_pieces(root: dict[str, Any], block: int, data: st.DataObject) -> None:
    text = json.dumps({"a": [1, [2]], **root}).encode()
    place = data.draw(st.integers(0, len(text) - 1))
    damage = data.draw(st.sampled_from([b"", b",", b"]", b"}", b"[", b"{", b'"', b"\\", b"\xff", b"1"]))
    text = text[:place] + damage + text[place + data.draw(st.integers(0, 1)) :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_file, "_BLOCK", block)
        try:
            expected = json.loads(text)
        except ValueError:
            with pytest.raises(ValueError):  # noqa: PT011 - any of them
                whole_again(text)
        else:
            if isinstance(expected, dict) and len(json.loads(text, object_pairs_hook=list)) == len(expected):
                assert read_in_pieces(text) == expected


def whole_again(text: bytes) -> None:
    """Read every piece, also of a list whose key comes a second time."""
    lists = JsonLists(io.BytesIO(text))
    for number in range(len(lists._spans)):
        lists.content = {"each": [number]}
        for piece in lists.pieces("each"):
            parse_piece(*piece)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"a": [{"b": 1}, {"b": 2}, {"b" 3}], "c": 4}', "Expecting ':' delimiter at byte 32"),
        (b'{"a": [{"b": 1}, {"b": 2}], "c" 4}', "Expecting ':' delimiter at byte 32"),
        (b'{"a": [{"b": 1} {"b": 2}, {"b": 3}]}', "expected a comma and an item at byte 15"),
        (b'{"a": [{"b": 1}, {"b": 2}', "ends after 25 bytes, before all brackets are closed"),
    ],
)
def test_the_place_of_the_damage_is_told(
    tmp_path: Path, text: bytes, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_file, "_BLOCK", 8)
    with pytest.raises(DataError, match=f"not JSON, or damaged \\({expected}"), json_errors(tmp_path):
        whole_again(text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json: no such file"):
        read_json(tmp_path / "absent.json")
