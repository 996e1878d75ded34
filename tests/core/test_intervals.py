"""Units: inside everything counts steps; what is due comes at the right step and always after the last."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.intervals import Progress, Triggers, to_steps


def due_steps(period: float, total: int) -> list[int]:
    triggers = Triggers(total)
    triggers.add(period, "act")
    return [step for step in range(1, total + 1) if triggers.due(step)]


def test_progress_counts_steps_and_tells_epochs() -> None:
    progress = Progress(total_steps=30, steps_per_epoch=8)
    assert (progress.epoch, progress.is_done) == (0.0, False)
    progress.step = 12
    assert progress.epoch == 1.5
    progress.step = 30
    assert progress.is_done


def test_progress_resumes_from_its_state() -> None:
    before = Progress(total_steps=30, steps_per_epoch=8, step=17)
    after = Progress(total_steps=30, steps_per_epoch=8)
    after.load_state_dict(before.state_dict())
    assert after == before


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [(None, 7, 7), (2, None, 188), (0.5, None, 47), (None, None, 20), (0.1, None, 9.4), (3, 7, 7)],
)
def test_durations_come_out_in_steps(epochs: float | None, steps: int | None, expected: float) -> None:
    assert to_steps(epochs, steps, steps_per_epoch=94, default=20) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("period", "total", "expected"),
    [
        (10, 30, [10, 20, 30]),
        (10, 25, [10, 20, 25]),
        (2.5, 10, [3, 5, 8, 10]),
        (100, 7, [7]),
        (0.25, 4, [1, 2, 3, 4]),
        (1, 3, [1, 2, 3]),
    ],
)
def test_due_every_so_many_steps_and_after_the_last(period: float, total: int, expected: list[int]) -> None:
    assert due_steps(period, total) == expected


def test_due_is_where_the_number_of_whole_periods_grows() -> None:
    """By counting them at both ends of each step, the last of which always counts."""
    for total, period in itertools.product(range(1, 31), [0.25, 1, 1.1, 4 / 3, 2, 2.5, 3, 7 / 3, 10, 30, 31, math.inf]):
        every = max(1.0, period)
        whole = [math.floor(step / every + 1e-9) for step in range(total)]
        whole.append(whole[-1] + 1)
        assert due_steps(period, total) == [step for step in range(1, total + 1) if whole[step] > whole[step - 1]]


@given(st.integers(1, 400), st.integers(1, 12), st.integers(1, 12), st.integers(1, 300))
def test_fractions_of_epochs_never_drift(per_epoch: int, numerator: int, denominator: int, total: int) -> None:
    exact = max(Fraction(1), Fraction(numerator * per_epoch, denominator))
    marks = [-(-k * exact.numerator // exact.denominator) for k in range(1, int(total / exact) + 1)]
    expected = sorted({*(int(mark) for mark in marks if mark <= total), total})
    assert due_steps(to_steps(numerator / denominator, None, per_epoch, 0), total) == expected


def test_a_third_of_an_epoch_is_due_three_times_an_epoch_for_long() -> None:
    triggers = Triggers(10**9)
    triggers.add(to_steps(1 / 3, None, 1000, 0), "act")
    for epoch in (0, 1, 999, 123_456):
        found = [step for step in range(epoch * 1000 + 1, epoch * 1000 + 1001) if triggers.due(step)]
        assert [step - epoch * 1000 for step in found] == [334, 667, 1000]


def test_what_is_due_comes_in_the_order_in_which_it_was_put_down() -> None:
    triggers = Triggers(12)
    triggers.add(6, "save")
    triggers.add(4, "evaluate")
    triggers.add(3, "record")
    triggers.add(math.inf, "test")
    assert [f"{step} {action}" for step in range(1, 13) for action in triggers.due(step)] == [
        "3 record", "4 evaluate", "6 save", "6 record", "8 evaluate", "9 record",
        "12 save", "12 evaluate", "12 record", "12 test",
    ]  # fmt: skip
