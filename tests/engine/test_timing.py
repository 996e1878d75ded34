"""When a run will end, by numbers that stand for the clock."""

from __future__ import annotations

import random

import pytest

from paceline.core.intervals import Triggers
from paceline.engine.timing import StepTimer

TOTAL = 1000
STEP, EVALUATE, SAVE = 0.1, 40.0, 2.0


def triggers() -> Triggers:
    made = Triggers(TOTAL)
    made.add(50, "save")
    made.add(100, "evaluate")
    made.add(20, "log")
    return made


def estimates(step_seconds: list[float]) -> list[tuple[float, float]]:
    """At each line of the log the time left as estimated, and as it turns out."""
    durations = {"save": SAVE, "evaluate": EVALUATE, "log": 0.01}
    timer, due = StepTimer(), triggers()
    truth = sum(step_seconds) + sum(durations[name] * number for name, number in due.left(0).items())
    found = []
    for step in range(1, TOTAL + 1):
        timer.add_step(step_seconds[step - 1], 0.0, 64, TOTAL)
        truth -= step_seconds[step - 1]
        pending = due.due(step)
        while pending:
            name = pending.pop(0)
            if name == "log":
                found.append((timer.seconds_left(TOTAL - step, due.left(step, pending)), truth))
            timer.add_action(name, durations[name])
            truth -= durations[name]
    return found


def test_actions_left_are_counted_as_they_will_be_due() -> None:
    due = triggers()
    for step in (0, 49, 50, 99, 640, 999, 1000):
        later = [name for each in range(step + 1, TOTAL + 1) for name in due.due(each)]
        assert due.left(step) == {name: later.count(name) for name in ("save", "evaluate", "log")}


@pytest.mark.parametrize("seed", range(3))
def test_the_eta_counts_evaluations_and_saves_from_the_first_tenth_on(seed: int) -> None:
    """Evaluations take three quarters of this run; steps vary by half, and the first ones are slow."""
    draws = random.Random(seed)
    steps = [STEP * draws.uniform(0.5, 1.5) for _ in range(TOTAL)]
    steps[:3] = [5.0, 2.0, 1.0]
    found = [pair for place, pair in enumerate(estimates(steps)) if (place + 1) * 20 >= TOTAL / 10]
    assert max(abs(estimate - truth) / truth for estimate, truth in found if truth > 1) < 0.15
    assert found[0][1] > 4 * STEP * TOTAL  # steps alone are a small part of it


def test_a_machine_that_becomes_slower_is_followed() -> None:
    steps = [STEP] * (TOTAL // 2) + [4 * STEP] * (TOTAL // 2)
    estimate, truth = estimates(steps)[40]  # at step 820
    assert estimate == pytest.approx(truth, rel=0.15)


def test_an_evaluation_that_was_held_up_does_not_move_the_end() -> None:
    timer = StepTimer()
    for step in range(100):
        timer.add_step(STEP, 0.0, 64, TOTAL)
        if step % 25 == 24:
            timer.add_action("evaluate", 10 * EVALUATE if step == 49 else EVALUATE)
    left = timer.seconds_left(TOTAL - 100, {"evaluate": 36})
    assert left == pytest.approx((TOTAL - 100) * STEP + 36 * EVALUATE)
