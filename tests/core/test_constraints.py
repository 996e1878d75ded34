"""Checks that a type cannot express: of one argument, and of several together."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from paceline.core.arguments import (
    ArgumentCheck,
    ArgumentsCheck,
    AtMost,
    AtMostOneOf,
    ExactlyOneOf,
    Increasing,
    KeyOf,
    Ordered,
    Requires,
    SameLength,
    SumsToOne,
    Unique,
    check_of,
)
from paceline.core.registry import NameOf
from paceline.core.signatures import arguments_of, from_json, to_json

ALONE: list[tuple[ArgumentCheck, Any, Any, str]] = [
    (Increasing(), [1, 2, 5], [1, 5, 5], "got 5 after 5"),
    (Increasing(), [[0, 1.0], [3, 0.5]], [[3, 1.0], [0, 0.5]], "got 0 after 3"),
    (Ordered(), [1, 1], [2, 1], r"got \[2, 1\]"),
    (Unique(), ["a", "b"], ["a", "b", "a"], "got 'a' again"),
    (SumsToOne(), {"a": 0.25, "b": 0.75}, {"a": 0.5, "b": 0.4}, r"got 0\.9"),
    (NameOf("model", "timm/"), "timm/resnet18", "timm/resnet81", "timm/resnet18"),
    (NameOf("model", "timm/"), "timm/resnet18.a1_in1k", "torchvision/resnet18", "expected timm/NAME"),
]
TOGETHER: list[tuple[ArgumentsCheck, list[dict[str, Any]], list[dict[str, Any]]]] = [
    (ExactlyOneOf("a", "b"), [{"a": 0}, {"b": 1}, {"a": 1, "b": False}], [{}, {"a": 1, "b": 2}]),
    (AtMostOneOf("a", "b"), [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 2}]),
    (Requires("a", "b", "c"), [{}, {"b": 1}, {"a": 1, "c": 1}], [{"a": 1}]),
    (SameLength("a", "b"), [{}, {"a": [1]}, {"a": [1], "b": [2]}], [{"a": [1], "b": [2, 3]}]),
    (AtMost("a", "b"), [{}, {"a": 2}, {"a": 1, "b": 1}, {"a": 0, "b": 0.5}], [{"a": 1, "b": 0}]),
    (KeyOf("a", "b"), [{}, {"a": "x"}, {"a": "x", "b": {"x": 1}}], [{"b": {"x": 1}}, {"a": "y", "b": {"x": 1}}]),
]


def name_of(check: Any) -> str | None:
    return type(check).__name__ if isinstance(check, ArgumentCheck | ArgumentsCheck) else None


@pytest.mark.parametrize(("check", "right", "wrong", "message"), ALONE, ids=name_of)
def test_one_argument(check: ArgumentCheck, right: Any, wrong: Any, message: str) -> None:
    hints: dict[type, Any] = {list: Sequence[Any], dict: Mapping[str, float], str: str}
    hint = hints[type(right)]

    def take(value): ...  # type: ignore[no-untyped-def]

    take.__annotations__["value"] = Annotated[hint, check]
    live = arguments_of(take)
    for arguments in (live, from_json("take", to_json(live))):
        assert dict(arguments.model_validate({"value": right})) == {"value": right}
        with pytest.raises(ValidationError, match=message):
            arguments.model_validate({"value": wrong})


@pytest.mark.parametrize(("check", "right", "wrong"), TOGETHER, ids=name_of)
def test_several_arguments(check: ArgumentsCheck, right: list[dict[str, Any]], wrong: list[dict[str, Any]]) -> None:
    def take(a: Any = None, b: Any = None, c: Any = None) -> None: ...

    live = arguments_of(take, (), [check])
    for arguments in (live, from_json("take", to_json(live), [check.row()])):
        for given in right:
            arguments.model_validate(given)
        for given in wrong:
            with pytest.raises(ValidationError):
                arguments.model_validate(given)


def test_what_is_not_given_is_reported() -> None:
    nothing = {"a": None, "b": None}
    assert ExactlyOneOf("a", "b").problem(nothing) == "give either a or b, got none of them"
    assert ExactlyOneOf("a", "b").problem({"a": 1, "b": 2}) == "give either a or b, got a and b"
    assert Requires("a", "b").problem({"a": 1, "b": None}) == "a needs b"


def test_a_check_is_words() -> None:
    row = Requires("stride", "window").row()
    assert row == ["Requires", "stride", "window"]
    assert check_of(row).words == ("stride", "window")
