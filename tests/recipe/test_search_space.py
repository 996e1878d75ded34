"""Which trials the overrides of a sweep describe."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import RecipeError, UsageError
from paceline.recipe.search_space import MAX_TRIALS, Range, read_search_space, split_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1,0.01", ["0.1", "0.01"]),
        ("a, b ,c", ["a", "b", "c"]),
        ("[8,16]", ["[8,16]"]),
        ("[8,16],[32]", ["[8,16]", "[32]"]),
        ("{name: ema, decay: 0.9},none", ["{name: ema, decay: 0.9}", "none"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("'it''s, b',c", ["'it''s, b'", "c"]),
        ("it's,that's", ["it's", "that's"]),
        (r'"a\",b",c', [r'"a\",b"', "c"]),
        ("[it's, b],'x]'", ["[it's, b]", "'x]'"]),
        ('{name: "a}, b"},c', ['{name: "a}, b"}', "c"]),
        ("", [""]),
    ],
)
def test_commas_separate_values_unless_they_are_inside_one(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@given(st.lists(st.lists(st.integers(0, 99), max_size=3), min_size=1, max_size=4))
def test_lists_of_any_length_stay_whole(lists: list[list[int]]) -> None:
    assert split_values(",".join(map(str, lists))) == [str(each) for each in lists]


def test_a_grid_has_every_combination_and_keeps_the_order_of_overrides() -> None:
    space = read_search_space(["optimizer.lr=0.1,0.01", "train.epochs=2", "train.seed=0,1,2"])
    trials = space.grid()
    assert len(trials) == len(set(trials)) == 6
    assert trials[:2] == [("optimizer.lr=0.1", "train.seed=0"), ("optimizer.lr=0.1", "train.seed=1")]
    assert space.shared == ["train.epochs=2"]
    assert space.overrides(trials[5]) == ["optimizer.lr=0.01", "train.epochs=2", "train.seed=2"]


def test_random_trials_differ_and_a_longer_search_begins_with_the_same() -> None:
    space = read_search_space(["optimizer.lr=log:1e-4..1e-1", "data.batch_size=16..64", "model.depth=1,2"])
    few, many = space.sample(5, seed=3), space.sample(20, seed=3)
    assert many[:5] == few
    assert len(set(many)) == 20
    assert space.sample(5, seed=4) != few
    for trial in many:
        values = dict(each.split("=") for each in trial)
        assert 1e-4 <= float(values["optimizer.lr"]) <= 1e-1
        assert 16 <= int(values["data.batch_size"]) <= 64
        assert values["model.depth"] in ("1", "2")


@given(st.floats(0, 1, exclude_max=True))
def test_draws_stay_within_their_bounds(share: float) -> None:
    assert 3 <= int(Range("k", 3, 5, False, True).draw(share)) <= 5
    assert 3 <= int(Range("k", 3, 5, True, True).draw(share)) <= 5
    assert -0.123456 <= float(Range("k", -0.123456, 0.654321, False, False).draw(share)) <= 0.654321
    assert 1.00004e-5 <= float(Range("k", 1.00004e-5, 0.1, True, False).draw(share)) <= 0.1


def test_ranges_are_uniform_in_the_number_or_in_its_logarithm() -> None:
    shares = [(place + 0.5) / 3000 for place in range(3000)]
    linear = [float(Range("k", 2, 4, False, False).draw(share)) for share in shares]
    assert statistics.fmean(linear) == pytest.approx(3, abs=1e-3)
    logarithms = [math.log10(float(Range("k", 1e-4, 1e-1, True, False).draw(share))) for share in shares]
    assert statistics.fmean(logarithms) == pytest.approx(-2.5, abs=1e-3)
    assert statistics.stdev(logarithms) == pytest.approx(3 / math.sqrt(12), abs=1e-2)
    integers = [int(Range("k", 1, 3, False, True).draw(share)) for share in shares]
    assert [integers.count(number) for number in (1, 2, 3)] == [1000, 1000, 1000]


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        read_search_space(["a=1,", "b=5..2", "c=log:0..1", "d=1,1", "e", "f=1,2", "f=3", "name=x,y"])
    places = ["a=1,", "b=5..2", "c=log:0..1", "d=1,1", "e", "f", "name"]
    assert [line.split(": ")[1] for line in caught.value.problems] == places
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("words", [[], ["optimizer.lr=0.1"], ["model.widths=[8,16]"]])
def test_there_must_be_something_to_search_over(words: list[str]) -> None:
    with pytest.raises(UsageError, match="several values"):
        read_search_space(words)


def test_a_search_has_limits() -> None:
    with pytest.raises(UsageError, match="a range needs --samples"):
        read_search_space(["optimizer.lr=0.1..0.2"]).grid()
    space = read_search_space([f"{key}={','.join(map(str, range(11)))}" for key in "abc"])
    with pytest.raises(UsageError, match="1,331 trials"):
        space.grid()
    assert len(space.sample(MAX_TRIALS, seed=0)) == MAX_TRIALS
    with pytest.raises(UsageError, match="only 2 different"):
        read_search_space(["a=1,2"]).sample(3, seed=0)
    with pytest.raises(UsageError, match="--samples"):
        space.sample(0, seed=0)
