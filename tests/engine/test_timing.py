"""When a run will end; by numbers that stand for the clock."""

from __future__ import annotations

import pytest

from paceline.loggers.meters import StepTimer

TOTAL = 1000
STEP, EVALUATION = 0.1, 4.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that have passed; a test moves it on."""
    passed = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: passed[0])
    return passed


def take_step(timer: StepTimer, clock: list[float], seconds: float = STEP) -> None:
    timer.start_step(waited=0.0)
    clock[0] += seconds
    timer.end_step(64)


def test_the_time_left_counts_what_is_done_between_steps_but_not_the_slow_first_steps(clock: list[float]) -> None:
    timer = StepTimer()
    for step, seconds in enumerate([5.0, 2.0, 1.0, *[STEP] * 497], 1):
        take_step(timer, clock, seconds)
        clock[0] += EVALUATION if step % 100 == 0 else 0.0
    truth = 500 * STEP + 5 * EVALUATION
    assert timer.seconds_left(TOTAL - 500) == pytest.approx(truth, rel=0.01)


def test_the_first_steps_are_all_that_is_known_at_first(clock: list[float]) -> None:
    timer = StepTimer()
    assert timer.seconds_left(TOTAL) == 0
    take_step(timer, clock, 2.0)
    assert timer.seconds_left(9) == pytest.approx(18.0)
