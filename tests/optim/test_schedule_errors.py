"""Schedules with arguments that make no sense are refused by key and value."""

from typing import Any

import pytest
from pydantic import ValidationError
from small_schedules import schedule

from paceline.core.errors import ArgumentError
from paceline.core.registry import register


@pytest.mark.parametrize(
    ("decay", "keys", "argument", "got"),
    [
        ("multi_step", {"milestone_epochs": [3, 10]}, "milestone_epochs", "10"),
        ("multi_step", {"milestone_steps": [101], "count_from": 1}, "milestone_steps", "101"),
        ("multi_step", {"milestone_epochs": [8], "warmup_steps": 20, "decay_from": "warmup"}, "milestone_epochs", "8"),
        ("multi_step", {"milestone_steps": [5, 3]}, "milestone_steps", "3 after 5"),
        ("step_cosine", {"milestone_steps": [5, 5]}, "milestone_steps", "5 after 5"),
        ("multi_step", {"milestone_steps": [-1]}, "milestone_steps", "-1"),
        ("multi_step", {"milestone_steps": []}, "milestone_steps", "none"),
        ("multi_step", {}, "milestone_epochs", "neither"),
        ("multi_step", {"milestone_epochs": [1], "milestone_steps": [1]}, "milestone_steps", ""),
        ("step_cosine", {"milestone_steps": [100], "count_from": 1}, "milestone_steps", "100"),
        ("step", {"every_epochs": 30}, "every_epochs", "30"),
        ("exponential", {"gamma": 0.9, "every_steps": 0}, "every_steps", "0"),
        ("wsd", {"cooldown_epochs": 9, "warmup_epochs": 2}, "cooldown_epochs", "90 steps"),
        ("wsd", {"cooldown_share": 0.3, "cooldown_steps": 4}, "cooldown_share", ""),
        ("one_cycle", {"warmup_steps": 3}, "warmup", ""),
        ("cosine", {"warmup_epochs": 10}, "warmup_epochs", "10"),
        ("cosine", {"warmup_steps": 200}, "warmup_steps", "200"),
        ("cosine", {"floor_lr": 2.0}, "floor_lr", "2"),
    ],
)
def test_errors_name_the_argument_and_the_value(decay: str, keys: dict[str, Any], argument: str, got: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        schedule(decay, **keys)
    assert caught.value.argument == argument
    assert got in caught.value.reason


def test_points_that_are_just_reached() -> None:
    assert schedule("multi_step", milestone_steps=[99])(99) == 0.1
    assert schedule("multi_step", milestone_steps=[100], count_from=1)(99) == 0.1
    assert schedule("multi_step", milestone_epochs=[9], per="epoch")(90) == 0.1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("multi_step", {"milestone_epochs": [5, 3]}, "3 after 5"),
        ("multi_step", {}, "milestone_epochs or milestone_steps"),
        ("step", {"every_epochs": 1.0, "every_steps": 1}, "every_epochs and every_steps"),
        ("exponential", {"gamma": 1.0, "every_epochs": 1.0, "every_steps": 1}, "every_epochs or every_steps"),
    ],
)
def test_the_recipe_check_names_wrong_arguments(name: str, arguments: dict[str, Any], message: str) -> None:
    entry = register.kind("schedule").find(name)
    assert entry is not None
    with pytest.raises(ValidationError, match=message):
        entry.arguments.model_validate(arguments)
