"""What schedules refuse, and how they say so."""

from typing import Any

import pytest
from pydantic import ValidationError
from small_schedules import schedule

from paceline.core.errors import ArgumentError
from paceline.core.registry import register


@pytest.mark.parametrize(
    ("decay", "keys", "message"),
    [
        (
            "multi_step",
            {"milestone_epochs": [3, 10]},
            "milestone_epochs: expected points before the end of the 10 epochs of the run, got 10",
        ),
        (
            "multi_step",
            {"milestone_steps": [101], "count_from": 1},
            "milestone_steps: expected points before the end of the 100 steps of the run, got 101",
        ),
        (
            "multi_step",
            {"milestone_epochs": [8], "warmup_steps": 20, "decay_from": "warmup"},
            "milestone_epochs: expected points before the end of the 8 epochs of the run that follow warm-up, got 8",
        ),
        ("multi_step", {"milestone_steps": [5, 3]}, "milestone_steps: expected increasing numbers, got 3 after 5"),
        ("step_cosine", {"milestone_steps": [5, 5]}, "milestone_steps: expected increasing numbers, got 5 after 5"),
        ("multi_step", {"milestone_steps": [-1]}, "milestone_steps: expected numbers >= 0, got -1"),
        ("multi_step", {"milestone_steps": []}, "milestone_steps: expected at least one point, got none"),
        ("multi_step", {}, "milestone_epochs: expected this or milestone_steps, got neither"),
        (
            "multi_step",
            {"milestone_epochs": [1], "milestone_steps": [1]},
            "milestone_steps: cannot be given together with milestone_epochs; keep one of them",
        ),
        (
            "step_cosine",
            {"milestone_steps": [100], "count_from": 1},
            "milestone_steps: expected the last one, where the cosine begins, inside the run, got 100",
        ),
        (
            "step",
            {"every_epochs": 30},
            "every_epochs: expected points before the end of the 10 epochs of the run, got 30",
        ),
        ("exponential", {"gamma": 0.9, "every_steps": 0}, "every_steps: expected a number > 0, got 0"),
        (
            "piecewise",
            {"point_epochs": [[0, 1], [12, 0]]},
            "point_epochs: expected points before the end of the 10 epochs of the run, got 12",
        ),
        (
            "wsd",
            {"cooldown_epochs": 9, "warmup_epochs": 2},
            "cooldown_epochs: expected a cool-down of at most the 80 steps that warm-up leaves, got 90 steps",
        ),
        (
            "wsd",
            {"cooldown_share": 0.3, "cooldown_steps": 4},
            "cooldown_share: cannot be given together with cooldown_epochs or cooldown_steps",
        ),
        ("one_cycle", {"warmup_steps": 3}, "warmup: one_cycle rises by itself: set warmup to none"),
        ("one_cycle", {"up_share": 1.0}, "up_share: expected a share from 0 up to, but not including, 1, got 1"),
        ("cosine", {"warmup_epochs": 10}, "warmup_epochs: expected less than the run's 10 epochs, got 10"),
        ("cosine", {"warmup_steps": 200}, "warmup_steps: expected less than the run's 100 steps, got 200"),
        ("cosine", {"warmup_steps": -1}, "warmup_steps: expected a number >= 0, got -1"),
        (
            "cosine",
            {"warmup": "none", "warmup_steps": 1},
            "warmup_steps: given, but warmup is none; set it to linear or constant",
        ),
        (
            "cosine",
            {"warmup": "constant", "warmup_steps": 1},
            "warmup_from: expected a share > 0, since warmup is constant, got 0",
        ),
        ("cosine", {"floor": 1.5}, "floor: expected a share from 0 to 1, got 1.5"),
        ("cosine", {"floor_lr": 2.0}, "floor_lr: expected a learning rate from 0 to 1, got 2"),
        ("cosine", {"floor_lr": 0.1, "floor": 0.1}, "floor_lr: cannot be given together with floor; keep one of them"),
    ],
)
def test_refusals_name_the_argument(decay: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        schedule(decay, **keys)
    assert str(caught.value) == message
    assert f"{caught.value.argument}: {caught.value.reason}" == message


def test_points_that_are_just_reached() -> None:
    assert schedule("multi_step", milestone_steps=[99])(99) == 0.1
    assert schedule("multi_step", milestone_steps=[100], count_from=1)(99) == 0.1
    assert schedule("multi_step", milestone_epochs=[9], per="epoch")(90) == 0.1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("multi_step", {"milestone_epochs": [5, 3]}, "expected increasing numbers, got 3 after 5"),
        ("multi_step", {}, "give either milestone_epochs or milestone_steps, got none"),
        (
            "step",
            {"every_epochs": 1.0, "every_steps": 1},
            "give either every_epochs or every_steps, got every_epochs and every_steps",
        ),
        (
            "exponential",
            {"gamma": 1.0, "every_epochs": 1.0, "every_steps": 1},
            "give either every_epochs or every_steps",
        ),
        ("piecewise", {"point_steps": [[5.0, 1.0], [3.0, 1.0]]}, "expected increasing numbers, got 3 after 5"),
        ("piecewise", {"point_steps": [[5.0]]}, "at least 2 items"),
    ],
)
def test_what_a_recipe_is_refused_for_at_once(name: str, arguments: dict[str, Any], message: str) -> None:
    entry = register.kind("schedule").find(name)
    assert entry is not None
    with pytest.raises(ValidationError, match=message):
        entry.arguments.model_validate(arguments)
