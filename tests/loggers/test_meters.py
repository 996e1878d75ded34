from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.loggers.meters import Meter, Meters

NUMBERS = st.floats(min_value=-1e6, max_value=1e6, allow_subnormal=False)


def meter_of(values: list[Any], window: int = 20) -> Meter:
    meter = Meter(window)
    for value in values:
        meter.extend([value])
    return meter


def test_summary_of_a_short_history_by_hand() -> None:
    summary = meter_of([4.0, 1.0, 3.0, 10.0], window=3).summary()
    assert summary == {"median": 3.0, "mean": 14 / 3, "global_mean": 4.5, "max": 10.0, "latest": 10.0}


@given(st.lists(st.lists(st.floats(), max_size=30), max_size=4), st.integers(1, 25))
def test_many_values_at_once_are_as_one_by_one(columns: list[list[float]], window: int) -> None:
    at_once, one_by_one = Meters(window), Meters(window)
    for values in columns:
        at_once.extend({"loss": values, "lr": values[:2]})
        for place, value in enumerate(values):
            one_by_one.extend({"loss": [value], "lr": [value]} if place < 2 else {"loss": [value]})
    kept = one_by_one.state_dict()
    assert {name: state for name, state in at_once.state_dict().items() if state["count"]} == kept
    for name in kept:
        assert repr(at_once.summary(name)) == repr(one_by_one.summaries()[name])


def test_median_of_an_even_window_is_the_lower_middle() -> None:
    assert meter_of([4.0, 1.0, 2.0, 3.0]).summary()["median"] == 2.0


def test_summary_is_empty_before_the_first_value() -> None:
    assert Meter().summary() == {}


@given(values=st.lists(NUMBERS, min_size=1, max_size=60), window=st.integers(1, 25))
def test_summary_agrees_with_torch(values: list[float], window: int) -> None:
    summary = meter_of(values, window).summary()
    last = torch.tensor(values[-window:], dtype=torch.float64)
    assert summary["median"] == last.median().item()
    assert summary["max"] == last.max().item()
    assert summary["mean"] == pytest.approx(last.mean().item(), rel=1e-9, abs=1e-9)
    everything = torch.tensor(values, dtype=torch.float64)
    assert summary["global_mean"] == pytest.approx(everything.mean().item(), rel=1e-9, abs=1e-9)


def test_not_a_number_shows_in_every_metric_it_enters() -> None:
    meter = meter_of([1.0, math.nan, 2.0], window=3)
    summary = meter.summary()
    assert all(math.isnan(summary[name]) for name in ("median", "mean", "global_mean", "max"))
    assert summary["latest"] == 2.0
    meter.extend([5.0] * 3)
    assert meter.summary()["median"] == 5.0


@given(
    before=st.lists(st.floats(width=64), max_size=30),
    after=st.lists(st.floats(width=64), min_size=1, max_size=30),
)
def test_a_resumed_meter_gives_the_same_bits(before: list[float], after: list[float]) -> None:
    whole = meter_of([*before, *after])
    resumed = Meter()
    resumed.load_state_dict(json.loads(json.dumps(meter_of(before).state_dict(), allow_nan=False)))
    resumed.extend(after)
    assert repr(resumed.summary()) == repr(whole.summary())
    assert resumed.state_dict() == whole.state_dict()


def test_meters_summarise_each_name() -> None:
    meters = Meters(window=2)
    meters.extend({"loss": [4.0], "lr": [0.5]})
    meters.extend({"loss": [2.0], "lr": [0.25], "late": [7.0]})
    summaries = meters.summaries()
    assert list(summaries) == ["loss", "lr", "late"]
    assert summaries["loss"]["mean"] == 3.0
    assert summaries["lr"]["latest"] == 0.25
    assert summaries["late"]["global_mean"] == 7.0


def test_meters_resume_and_forget_what_they_had() -> None:
    def values(steps: range) -> dict[str, list[float]]:
        return {"loss": [1 / (step + 1) for step in steps], "lr": [0.1 * step for step in steps]}

    whole, first, second = Meters(), Meters(), Meters()
    second.extend({"other": [1.0]})
    whole.extend(values(range(50)))
    first.extend(values(range(30)))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.extend(values(range(30, 50)))
    assert second.summaries() == whole.summaries()
