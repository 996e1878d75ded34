"""Expectations and found values in words."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.recipe.problems import Node, describe, hint, join_or, near, show

WHOLE: Node = {"type": "integer", "minimum": 1}
AUTO: Node = {"const": "auto", "type": "string"}
NULL: Node = {"type": "null"}
STRING: Node = {"type": "string"}
BOOLEAN: Node = {"type": "boolean"}
NUMBER: Node = {"type": "number"}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([{"type": "integer"}], "a whole number"),
        ([WHOLE], "a whole number ≥ 1"),
        ([WHOLE, AUTO], "a whole number ≥ 1 or auto"),
        ([WHOLE, AUTO, NULL], "a whole number ≥ 1, auto or null"),
        ([{"type": "number", "exclusiveMinimum": 0}], "a number > 0"),
        ([{"type": "number", "minimum": 0, "maximum": 1}], "a number from 0 to 1"),
        ([{"type": "number", "minimum": 0, "exclusiveMaximum": 1}], "a number ≥ 0 and < 1"),
        ([{"type": "number", "minimum": 0, "exclusiveMinimum": 0, "maximum": 1}], "a number > 0 and ≤ 1"),
        ([BOOLEAN], "true or false"),
        ([BOOLEAN, NULL], "true, false or null"),
        ([STRING], "a string"),
        ([{"type": "string", "minLength": 1}], "a non-empty string"),
        ([{"type": "string", "pattern": "^a"}], "a string of another form"),
        ([{"type": "array"}], "a list"),
        ([{"type": "array", "minItems": 1}], "a list of at least 1 item"),
        ([{"type": "array", "maxItems": 3}], "a list of at most 3 items"),
        ([{"type": "array", "minItems": 2, "maxItems": 6}], "a list of at least 2 items and at most 6 items"),
        ([{"type": "array", "minItems": 2, "maxItems": 2}], "a list of 2 items"),
        ([{"type": "object", "properties": {}, "additionalProperties": False}], "a mapping"),
        ([{"type": "object", "properties": {}, "additionalProperties": True}], "a name or a mapping"),
        ([{"enum": ["a", "b", "c"], "type": "string"}], "one of a, b, c"),
        ([{"enum": ["a", "b"], "type": "string"}, NULL], "one of a, b or null"),
        ([{"enum": [1, 2]}], "one of 1, 2"),
        ([AUTO], "auto"),
        ([BOOLEAN, {"type": "integer"}, NUMBER, STRING, NULL], "true, false, a number, a string or null"),
        ([{}], "another value"),
    ],
)
def test_descriptions(nodes: list[Node], expected: str) -> None:
    assert describe(nodes) == expected


@pytest.mark.parametrize(
    ("value", "nodes", "expected"),
    [
        ("5", [WHOLE], "; remove the quotes"),
        ("0.5", [NUMBER], "; remove the quotes"),
        ("0.5", [WHOLE], ""),
        ("true", [BOOLEAN], "; remove the quotes"),
        ("yes", [BOOLEAN], ""),
        ("fast", [WHOLE, AUTO], ""),
        ("aut", [WHOLE, AUTO], '; did you mean "auto"?'),
        ("AUTO", [AUTO], '; did you mean "auto"?'),
        (20.0, [WHOLE], "; write 20"),
        (20.5, [WHOLE], ""),
        (20.0, [WHOLE, NUMBER], ""),
        (True, [STRING], "; quote it"),
        (5, [STRING, NULL], "; quote it"),
        (None, [STRING], ""),
        ("x", [{"type": "array"}], '; write ["x"]'),
        (3, [{"type": "array"}, NULL], "; write [3]"),
        ({}, [{"type": "array"}], ""),
        (3, [BOOLEAN], ""),
    ],
)
def test_hints(value: Any, nodes: list[Node], expected: str) -> None:
    assert hint(value, nodes) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("é", '"é"'),
        (None, "null"),
        (1e-3, "0.001"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ({"a": [1, True]}, '{"a": [1, true]}'),
        ("x" * 58, '"' + "x" * 58 + '"'),
        ("x" * 59, '"' + "x" * 58 + "…"),
    ],
)
def test_found_values(value: Any, expected: str) -> None:
    assert show(value) == expected
    assert len(show(value)) <= 60


def test_joining() -> None:
    assert [join_or(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a or b", "a, b or c"]


def test_near_words() -> None:
    assert near("SGD", ["adam", "sgd"]) == ["sgd"]
    assert near("resnet18", ["timm/resnet18", "torchvision/resnet18", "timm/resnet10t"]) == [
        "timm/resnet18",
        "torchvision/resnet18",
    ]
    assert near("epoch", ["epochs", "steps", "seed"]) == ["epochs"]
    assert near("zzz", ["epochs"]) == []
    assert near("a", []) == []
