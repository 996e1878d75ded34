"""Text to a tree with places: YAML 1.2 scalars, limits, and the places of keys and values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import RecipeError
from paceline.recipe import document as composer
from paceline.recipe.document import Document, KeyPath, Origin, resolve_scalar

Place = tuple[int, int]

SCALARS = {
    "true": True,
    "False": False,
    "TRUE": True,
    "yes": "yes",
    "no": "no",
    "on": "on",
    "off": "off",
    "null": None,
    "~": None,
    "": None,
    "0": 0,
    "-7": -7,
    "+12": 12,
    "010": 10,
    "0x1F": 31,
    "-0x10": -16,
    "0o17": 15,
    "1e-3": 0.001,
    "5.0e-4": 0.0005,
    ".5": 0.5,
    "5.": 5.0,
    "-1E+2": -100.0,
    "1_000": "1_000",
    "0b1": "0b1",
    "1:30": "1:30",
    "2024-01-01": "2024-01-01",
    "1e": "1e",
    "-": "-",
    ".": ".",
    "e5": "e5",
    "9" * 64: int("9" * 64),
    "9" * 65: "9" * 65,
}


@pytest.mark.parametrize("text", SCALARS)
def test_an_unquoted_word_means_what_yaml_1_2_says(text: str) -> None:
    value = resolve_scalar(text)
    assert value == SCALARS[text]
    assert type(value) is type(SCALARS[text])


def compose(text: str) -> Document:
    return composer.compose(text, "t")


def places(origins: dict[KeyPath, Origin]) -> dict[KeyPath, Place]:
    return {path: (origin.line or 0, origin.column or 0) for path, origin in origins.items()}


def problems(refusal: RecipeError) -> list[tuple[tuple[int, ...], str]]:
    split = [problem.split(": ", 1) for problem in refusal.problems]
    return [(tuple(map(int, place.split(":")[1:])), message) for place, message in split]


@pytest.mark.parametrize("text", [".inf", "-.Inf", "+.INF", ".nan", ".NaN"])
def test_numbers_that_are_not_finite_stay_numbers_for_validation_to_refuse(text: str) -> None:
    value = resolve_scalar(text)
    assert isinstance(value, float)
    assert not math.isfinite(value)


def test_quoted_and_block_scalars_are_strings() -> None:
    text = "a: '1'\nb: \"true\"\nc: |\n  5\nd: >-\n  null\n"
    assert compose(text).tree == {"a": "1", "b": "true", "c": "5\n", "d": "null"}


def test_places_of_keys_and_values() -> None:
    composed = compose("a: 1\nb:\n  c: [x, {d: y}]\n  é: z\nempty:\nlast: 2\n")
    assert places(composed.keys) == {
        ("a",): (1, 1),
        ("b",): (2, 1),
        ("b", "c"): (3, 3),
        ("b", "c", 1, "d"): (3, 11),
        ("b", "é"): (4, 3),
        ("empty",): (5, 1),
        ("last",): (6, 1),
    }
    assert places(composed.values) == {
        (): (1, 1),
        ("a",): (1, 4),
        ("b",): (3, 3),
        ("b", "c"): (3, 6),
        ("b", "c", 0): (3, 7),
        ("b", "c", 1): (3, 10),
        ("b", "c", 1, "d"): (3, 14),
        ("b", "é"): (4, 6),
        ("empty",): (5, 7),
        ("last",): (6, 7),
    }


_CHARACTERS = st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_categories=["Cc"])
_WORDS = st.text(_CHARACTERS)
_FINITE = st.floats(allow_nan=False, allow_infinity=False)
_TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | _FINITE | _WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=20,
)


@given(_TREES, st.sampled_from([None, 2]))
@settings(deadline=None, max_examples=50)
def test_json_text_reads_back_and_every_place_holds_what_it_should(tree: Any, indent: int | None) -> None:
    text = json.dumps(tree, indent=indent, ensure_ascii=False)
    composed = compose(text)
    assert composed.tree == tree
    lines = text.split("\n")
    for path, (line, column) in places(composed.keys).items():
        assert lines[line - 1][column - 1 :].startswith(json.dumps(path[-1], ensure_ascii=False))
    for path, (line, column) in places(composed.values).items():
        value = tree
        for segment in path:
            value = value[segment]
        first_line = json.dumps(value, indent=indent, ensure_ascii=False).split("\n")[0]
        assert lines[line - 1][column - 1 :].startswith(first_line)


def test_an_alias_stands_where_it_is_written_and_its_inside_where_the_anchor_is() -> None:
    composed = compose("a: &x {k: {l: 1}, m: [2]}\nb: *x\n")
    assert composed.tree["b"] == composed.tree["a"]
    assert composed.tree["b"] is not composed.tree["a"]
    assert places(composed.values)["b",] == (2, 4)
    assert places(composed.values)["b", "k", "l"] == places(composed.values)["a", "k", "l"] == (1, 15)
    assert places(composed.keys)["b", "m"] == (1, 19)
    assert places(composed.values)["b", "m", 0] == (1, 23)


def test_an_anchor_can_be_set_again() -> None:
    assert compose("a: &x 1\nb: *x\nc: &x 2\nd: *x\n").tree == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_an_empty_text_is_none() -> None:
    assert compose("").tree is None
    assert compose("# nothing\n").tree is None
    assert compose("---\n...\n").tree is None


REFUSED: dict[str, tuple[str, list[tuple[tuple[int, int], str]]]] = {
    "duplicate": ("a:\n  b: 1\n  c: 2\n  b: 3\n", [((4, 3), "a.b: given twice; first at 2:3")]),
    "python tag": (
        "a: !!python/object/apply:os.system [ls]\n",
        [((1, 4), "tag !!python/object/apply:os.system is not allowed; a recipe holds plain values only")],
    ),
    "own tag": ("a: !x 1\n", [((1, 4), "tag !x is not allowed; a recipe holds plain values only")]),
    "standard tag": ("!!str a: 1\n", [((1, 1), "tag !!str is not allowed; a recipe holds plain values only")]),
    "empty tag": ("a: ! 1\n", [((1, 4), "tag ! is not allowed; a recipe holds plain values only")]),
    "merge key": (
        "a: &a {x: 1}\nb:\n  <<: *a\n",
        [((3, 3), "merge keys (<<) are not supported; use extends, or repeat the values")],
    ),
    "number key": ("a: {1: x}\n", [((1, 5), 'key 1 is not a string; quote it: "1"')]),
    "null key": ("null: x\n", [((1, 1), 'key null is not a string; quote it: "null"')]),
    "boolean key": ("true: x\n", [((1, 1), 'key true is not a string; quote it: "true"')]),
    "no key": ("?\n: x\n", [((1, 2), "a key is missing")]),
    "list key": ("? [a, b]\n: x\n", [((1, 3), "a key must be a string")]),
    "alias key": ("a: &a x\n*a : y\n", [((2, 1), "a key must be a string")]),
    "alias in its anchor": ("a: &a [1, *a]\n", [((1, 11), "alias *a ")]),
    "alias without anchor": ("a: *nope\n", [((1, 4), "alias *nope has no anchor &nope before it")]),
    "two documents": ("a: 1\n---\nb: 2\n", [((2, 1), "a second document")]),
    "control character": ("a: 1\nb: x\x07\n", [((2, 5), "control character U+0007 is not allowed")]),
    "deep": ("a: " + "[" * 40 + "]" * 40, [((1, 35), "nested more than 32 deep")]),
    "endless": ("[" * 500_000, [((1, 33), "nested more than 32 deep")]),
    "long": ("[" + "1," * 20_000 + "]", [((1, 40_000), "more than 20,000 values, aliases expanded")]),
    "aliases": ("a: &a 1\nb: [" + "*a," * 65 + "]", [((2, 5 + 64 * 3), "more than 64 aliases")]),
    "several": (
        "a: 1\na: 2\n<<: {}\n3: 4\nb: !x 5\nc: *d\n",
        [
            ((2, 1), "a: given twice; first at 1:1"),
            ((3, 1), "merge keys (<<) are not supported; use extends, or repeat the values"),
            ((4, 1), 'key 3 is not a string; quote it: "3"'),
            ((5, 4), "tag !x is not allowed; a recipe holds plain values only"),
            ((6, 4), "alias *d has no anchor &d before it"),
        ],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("loader", [composer._Loader, yaml.SafeLoader], ids=["fast", "plain"])
def test_refused_with_place(case: str, loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composer, "_Loader", loader)
    text, expected = REFUSED[case]
    with pytest.raises(RecipeError) as refusal:
        compose(text)
    pairs = zip(problems(refusal.value), expected, strict=True)
    assert [(place, message[: len(start)]) for (place, message), (_, start) in pairs] == expected


def test_a_billion_laughs_are_cut_off() -> None:
    levels = [f"l{n}: &l{n} [" + ", ".join([f"*l{n - 1}"] * 8) + "]\n" for n in range(1, 9)]
    with pytest.raises(RecipeError) as refusal:
        compose("l0: &l0 [ha, ha]\n" + "".join(levels))
    assert [message for _, message in problems(refusal.value)] == ["more than 20,000 values, aliases expanded"]


def test_aliases_cannot_nest_deeper_than_text_can() -> None:
    chain = "".join(f"c{n}: &c{n} [*c{n - 1}]\n" for n in range(1, 40))
    with pytest.raises(RecipeError) as refusal:
        compose("c0: &c0 [x]\n" + chain)
    assert [message for _, message in problems(refusal.value)] == ["nested more than 32 deep"]


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: [1, 2\nb: 3\n", (2, 2), "from line 1"),
        ("a: b: c\n", (1, 5), "mapping values are not allowed"),
        ("a:\n\tb: 1\n", (2, 1), "indent with spaces, not tabs"),
        ("a: 'x\n", (2, 1), "unexpected end of stream"),
        ("a: 1\n b: 2\n", (2, 3), "mapping values are not allowed"),
    ],
)
def test_syntax_errors_have_a_place(text: str, place: tuple[int, int], words: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        compose(text)
    ((found, message),) = problems(refusal.value)
    assert found == place
    assert message.startswith("not valid YAML: ")
    assert words in message


def test_problems_before_a_syntax_error_are_kept() -> None:
    with pytest.raises(RecipeError) as refusal:
        compose("a: 1\na: 2\nb: [\n")
    assert [message.split(":")[0] for _, message in problems(refusal.value)] == ["a", "not valid YAML"]


@given(st.text(alphabet="ab:-[]{}&*!?|>'\"#%@,~<1.\n \t"))
@settings(deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        outcome: object = compose(text)
    except RecipeError as refusal:
        outcome = refusal.problems
    assert outcome
