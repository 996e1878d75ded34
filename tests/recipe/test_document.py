"""Files of every sort, read or refused with their place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.recipe.document import Origin, parse_value, places, read_document
from paceline.recipe.parts import PartSpec
from paceline.recipe.schema import LossPart

# Python's own words for a comma behind the last item, and its place.
_TRAILING_COMMA = (
    "8: not valid JSON: illegal trailing comma before end of object"
    if sys.version_info >= (3, 13)
    else "9: not valid JSON: expecting property name enclosed in double quotes"
)


def problems(path: Path, display: str | None = "r.yaml") -> list[str]:
    with pytest.raises(RecipeError) as refusal:
        read_document(path, display)
    return refusal.value.problems


def test_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("# about\nname: x\noptimizer: {lr: 1e-3}\n")
    document = read_document(path, "r.yaml")
    assert document.tree == {"name": "x", "optimizer": {"lr": 0.001}}
    assert str(document.keys["optimizer", "lr"]) == "r.yaml:3:13"
    assert str(document.values["optimizer", "lr"]) == "r.yaml:3:17"
    assert document.values[()] == Origin("r.yaml", 1, 1)


def test_a_file_is_called_by_its_path_unless_named(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("a: 1\n")
    assert str(read_document(path).values["a",]) == f"{path}:1:4"


def test_a_byte_order_mark_does_not_shift_columns(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    document = read_document(path, "r.yaml")
    assert document.tree == {"a": 1, "b": 2}
    assert str(document.values["a",]) == "r.yaml:1:4"
    assert str(document.values["b",]) == "r.yaml:2:4"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "r.yaml: the file is empty; a recipe is a mapping of keys to values"),
        (b"# only a comment\n", "r.yaml: the file is empty; a recipe is a mapping of keys to values"),
        (b"\n- a\n- b\n", "r.yaml:2:1: a recipe is a mapping of keys to values, got a list"),
        (b"word\n", "r.yaml:1:1: a recipe is a mapping of keys to values, got a single value"),
        (b"a: 1\nb: caf\xe9\n", "r.yaml:2:7: not UTF-8 text (byte 0xe9)"),
        ("a: é1\nb: ".encode() + b"\xff", "r.yaml:2:4: not UTF-8 text (byte 0xff)"),
        ("a: 1\n".encode("utf-16"), "r.yaml:1:1: not UTF-8 text (byte 0xff)"),
        (b"a: 1\n\x00", "r.yaml:2:1: control character U+0000 is not allowed"),
        (b"a: 1\na: 2\n", "r.yaml:2:1: a: given twice; first at 1:1"),
    ],
)
def test_refused_content(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    assert problems(path) == [expected]


def test_refused_files(tmp_path: Path) -> None:
    assert problems(tmp_path / "none.yaml") == ["r.yaml: no such file"]
    assert problems(tmp_path) == ["r.yaml: is a directory; expected a .yaml or .json file"]
    (tmp_path / "file").write_text("a: 1\n")
    assert problems(tmp_path / "file" / "r.yaml") == ["r.yaml: cannot be read: Not a directory"]
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert problems(tmp_path / "loop.yaml") == ["r.yaml: cannot be read: Too many levels of symbolic links"]
    os.mkfifo(tmp_path / "pipe.yaml")
    assert problems(tmp_path / "pipe.yaml") == ["r.yaml: is not a regular file"]


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    with path.open("wb") as file:
        file.truncate(5_000_000_000)  # sparse: reading it would fill the memory
    assert problems(path) == ["r.yaml: 5,000,000,000 bytes; a recipe has at most 1,000,000"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("a: 1\n")
    path.chmod(0)
    assert problems(path) == ["r.yaml: cannot be read: Permission denied"]


def test_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{\n\t"a":1,"b":[true,null,-1E5],\n\t"c":{"d":"\\ud83d\\ude00\\/\\\\ud83d"}\n}\n')
    document = read_document(path, "r.json")
    assert document.tree == {"a": 1, "b": [True, None, -100000.0], "c": {"d": "\U0001f600/\\ud83d"}}
    assert str(document.keys["a",]) == "r.json:2:2"
    assert str(document.values["b", 1]) == "r.json:2:18"
    assert str(document.values["c", "d"]) == "r.json:3:11"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"a": 1,}', [f"r.json:1:{_TRAILING_COMMA}"]),
        ('{\n "a": 1\n "b": 2\n}', ["r.json:3:2: not valid JSON: expecting ',' delimiter"]),
        ("{a: 1}", ["r.json:1:2: not valid JSON: expecting property name enclosed in double quotes"]),
        ("", ["r.json:1:1: not valid JSON: expecting value"]),
        (
            '{"a": NaN,\n "b": -Infinity}',
            [
                "r.json:1:7: not valid JSON: expected a finite number, got NaN",
                "r.json:2:7: not valid JSON: expected a finite number, got -Infinity",
            ],
        ),
        ('{"a": 1,\n "a": 2}', ["r.json:2:2: a: given twice; first at 1:2"]),
        ("[1]", ["r.json:1:1: a recipe is a mapping of keys to values, got a list"]),
        ("[" * 100_000, ["r.json:1:1: nested more than 32 deep"]),
    ],
)
def test_refused_json(content: str, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    assert problems(path, "r.json") == expected


def test_numbers_too_long_for_python_stay_strings(tmp_path: Path) -> None:
    for name in ("r.json", "r.yaml"):
        (tmp_path / name).write_text('{"a": ' + "9" * 5000 + "}")
        assert read_document(tmp_path / name).tree == {"a": "9" * 5000}


def test_values_from_the_command_line() -> None:
    read = {text: parse_value(text, "x").tree for text in ("1e-3", "off", "null", "", "[1, a]", "{x: [2]}", '"3"')}
    assert read == {
        "1e-3": 0.001,
        "off": "off",
        "null": None,
        "": None,
        "[1, a]": [1, "a"],
        "{x: [2]}": {"x": [2]},
        '"3"': "3",
    }
    document = parse_value("{x: [2]}", "x")
    assert str(document.keys["x",]) == str(document.values["x", 0]) == str(document.values[()]) == "command line"
    with pytest.raises(RecipeError) as refusal:
        parse_value("!!str 3", "command line: a=!!str 3")
    assert refusal.value.problems == [
        "command line: a=!!str 3: tag !!str is not allowed; a recipe holds plain values only"
    ]


def test_where_parts_are() -> None:
    losses = PartSpec(("losses", "*"), "loss", "name", LossPart)
    assert losses.places({"losses": ["a", {"name": "b"}]}) == [("losses", 0), ("losses", 1)]
    assert losses.places({"losses": {"name": "b"}}) == []
    assert losses.places({"losses": "a"}) == []
    assert losses.places({}) == []
    nested = PartSpec(("data", "train", "transforms", "*"), "transform", "name", LossPart)
    assert nested.places({"data": {"train": {"transforms": [1]}, "val": {"transforms": [1]}}}) == [
        ("data", "train", "transforms", 0)
    ]


def test_places_of_a_tree() -> None:
    assert list(places({"a": [1, {"b": 2}]}, ())) == [(), ("a",), ("a", 0), ("a", 1), ("a", 1, "b")]
