"""Patterns stand for tensors and modules, and say so when they stand for nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.models.patterns import is_inside, no_match, rename, select

NAMES = ["stem.weight", "blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.10.norm.bias", "blocks_2.weight", "cls"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("blocks", [1, 2, 3]),
        ("blocks.0", [1, 2]),
        ("blocks.1*", [3]),
        ("*.norm", [1, 2, 3]),
        ("*.bias", [2, 3]),
        ("blocks.?.norm.bias", [2]),
        ("[sc]*", [0, 5]),
        ("*", [0, 1, 2, 3, 4, 5]),
        ("cls", [5]),
        ("cl", []),
        ("re:.*norm.*", [1, 2, 3]),
        ("re:blocks", []),
        ("re:blocks[._]\\d+[.]w.*", [4]),
    ],
)
def test_a_module_stands_for_what_is_below_it(pattern: str, expected: list[int]) -> None:
    assert select(pattern, NAMES) == [NAMES[index] for index in expected]


@pytest.mark.parametrize(
    ("pattern", "replacement", "name", "expected"),
    [
        ("encoder", "backbone", "encoder.a.weight", "backbone.a.weight"),
        ("encoder.*", "*", "encoder.a.weight", "a.weight"),
        ("*", "model.*", "a.weight", "model.a.weight"),
        ("layers.*.attn.*", "blocks.*.attention.*", "layers.3.attn.q.weight", "blocks.3.attention.q.weight"),
        ("*.gamma", "*.weight", "a.b.gamma", "a.b.weight"),
        ("a+b", "c", "a+b.x", "c.x"),
        ("encoder", "backbone", "encoders.a", None),
        ("re:(.*?)(\\d+)", r"\1x\2", "a.12", "a.x12"),
        ("re:a[.](.*)", r"\1", "a.b", "b"),
        ("re:a[.](.*)", r"\1", "b.a.b", None),
    ],
)
def test_renaming(pattern: str, replacement: str, name: str, expected: str | None) -> None:
    assert rename(pattern, replacement, [name]) == ({} if expected is None else {name: expected})


words = st.lists(st.text("ab.*[", min_size=1, max_size=5), min_size=1, max_size=3).map(".".join)


@given(st.lists(words, min_size=1), words)
def test_renaming_a_module_to_itself_changes_nothing(names: list[str], pattern: str) -> None:
    assert all(old == new for old, new in rename(pattern, pattern, names).items())


@given(st.lists(words, min_size=1))
def test_a_star_stands_for_everything(names: list[str]) -> None:
    assert select("*", names) == names
    assert all(is_inside(name, [name]) and is_inside(name + ".x", [name]) for name in names)


def test_errors_show_what_may_have_been_meant() -> None:
    assert "blocks" in str(no_match("freeze", "block", NAMES))
    assert "stem.weight" in str(no_match("freeze", "re:^stem.wieght$", NAMES))
    assert "stem, blocks, blocks_2, cls" in str(no_match("freeze", "zzz", NAMES))
    assert "freeze 'zzz'" in str(no_match("freeze", "zzz", []))
