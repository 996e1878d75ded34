"""Learning rates as pure functions of the step."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.registry import register
from paceline.optim import schedule_catalogue
from paceline.optim.schedules import Schedule

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "rates.json").read_text(encoding="utf-8"))
NAMES = ["constant", "cosine", "linear"]


def schedule_of(name: str, **arguments: Any) -> Schedule:
    """The schedule with the decay that a recipe means by `name`."""
    entry = register.kind("schedule").find(name)
    assert entry is not None
    return Schedule(decay=entry.resolve(), arguments=dict(entry.arguments()), **arguments)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['decay']}-{case['arguments']['total_steps']}")
def test_rates_are_those_computed_in_fractions(case: dict[str, Any]) -> None:
    schedule = schedule_of(case["decay"], **case["arguments"])
    assert [schedule(step) for step in range(len(case["rates"]))] == pytest.approx(case["rates"], rel=1e-13, abs=1e-16)


@given(
    decay=st.sampled_from(NAMES),
    total=st.integers(2, 200),
    per_epoch_steps=st.integers(1, 50),
    quarters=st.integers(0, 796),
    warmup_from=st.floats(0, 1),
    floor=st.floats(0, 0.99),
)
def test_rates_rise_to_the_peak_and_fall_to_the_floor(
    decay: str, total: int, per_epoch_steps: int, quarters: int, warmup_from: float, floor: float
) -> None:
    warmup_steps = min(quarters / 4, total - 1)
    schedule = schedule_of(
        decay,
        lr=0.3,
        total_steps=total,
        steps_per_epoch=per_epoch_steps,
        warmup_steps=warmup_steps,
        warmup_from=warmup_from,
        floor=floor,
    )
    rates = [schedule(step) for step in range(total)]
    rising = [rate for step, rate in enumerate(rates) if step < warmup_steps]
    falling = [rate for step, rate in enumerate(rates) if step >= warmup_steps]
    assert all(one <= other + 1e-15 for one, other in pairwise(rising))
    assert all(one >= other - 1e-15 for one, other in pairwise(falling))
    assert all(0 <= rate <= 0.3 * (1 + 1e-15) for rate in rates)
    assert min(falling) >= 0.3 * floor - 1e-15
    assert not rising or rising[0] == pytest.approx(0.3 * warmup_from, abs=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_needs_nothing_but_the_step(name: str) -> None:
    """In any order, and from a schedule that was never asked before: resuming needs only the step."""
    arguments = {"lr": 0.1, "total_steps": 40, "steps_per_epoch": 8, "warmup_steps": 4, "floor": 0.1}
    once = schedule_of(name, **arguments)
    rates = [once(step) for step in range(40)]
    assert [once(step) for step in reversed(range(40))] == rates[::-1]
    assert [schedule_of(name, **arguments)(step) for step in range(40)] == rates


def test_the_registry_of_schedules_is_that_of_the_catalogue() -> None:
    assert register.kind("schedule") is schedule_catalogue.schedules
    assert set(NAMES) <= {entry.name for entry in schedule_catalogue.schedules}
