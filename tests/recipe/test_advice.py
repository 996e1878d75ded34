"""Advice about a wrong recipe leads to one that is right."""

from __future__ import annotations

import pytest

from paceline.core.errors import RecipeError
from paceline.recipe.load import load
from paceline.recipe.validate import validate

RECIPE = "quickstart"  # warms up linearly over half an epoch


def problem(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        validate(load(RECIPE, list(overrides)))
    (line,) = caught.value.problems
    return line


@pytest.mark.parametrize(
    ("wrong", "advice", "right"),
    [
        ("schedule.warmup=3", "schedule.warmup_epochs or schedule.warmup_steps", ["schedule.warmup_epochs=3"]),
        ("schedule.warmup=0.7", "schedule.warmup_epochs", ["schedule.warmup_epochs=0.7"]),
        ("schedule.warmup={epochs: 1}", "schedule.warmup_epochs", ["schedule.warmup_epochs=1"]),
        ("schedule.warmup.from=0.1", "schedule.warmup_from", ["schedule.warmup_from=0.1"]),
        (
            "schedule.warmup=none",
            "schedule.warmup_epochs to null",
            ["schedule.warmup=none", "schedule.warmup_epochs=null"],
        ),
        ("schedule.warmup_epochs=0", "set it to none", ["schedule.warmup_epochs=0", "schedule.warmup=none"]),
        ("schedule.warmup_epochs=null", "set it to none", ["schedule.warmup_epochs=null", "schedule.warmup=none"]),
        (
            "schedule.warmup_steps=100",
            "set schedule.warmup_epochs to null",
            ["schedule.warmup_steps=100", "schedule.warmup_epochs=null"],
        ),
        ("train.steps=10", "set train.epochs to null", ["train.steps=100", "train.epochs=null"]),
        ("train.warmup_epochs=1", '"schedule.warmup_epochs"', ["schedule.warmup_epochs=1"]),
        ("train.batch_size=32", '"data.batch_size"', ["data.batch_size=32"]),
        ("losses.0.weights=2", '"weight"', ["losses.0.weight=2"]),
    ],
)
def test_the_advice_works(wrong: str, advice: str, right: list[str]) -> None:
    assert advice in problem(wrong)
    validate(load(RECIPE, right))


def test_null_for_none_and_words_that_are_not_similar() -> None:
    assert problem("schedule.warmup=null").endswith("write none")
    assert "mean" not in problem("schedule.warmup=cosine")


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("data.batch_size", 2**20),
        ("evaluate.batch_size", 2**20),
        ("optimizer.base_batch_size", 2**20),
        ("train.epochs", 10**6),
        ("train.steps", 10**9),
        ("data.num_workers", 1024),
        ("evaluate.num_workers", 1024),
    ],
)
def test_absurdly_large_numbers_are_refused(key: str, most: int) -> None:
    others = ["train.epochs=null"] if key == "train.steps" else []
    validate(load(RECIPE, [f"{key}={most}", *others]))
    found = problem(f"{key}={most + 1}", *others)
    assert found.startswith(f"command line: {key}: ")
    assert str(most) in found
    assert str(most + 1) in found
