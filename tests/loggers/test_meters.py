from __future__ import annotations

import json
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.loggers.meters import PENDING_LIMIT, Meter, Meters

NUMBERS = st.floats(min_value=-1e6, max_value=1e6, allow_subnormal=False)


def meter_of(values: list[Any], window: int = 20) -> Meter:
    meter = Meter(window)
    for value in values:
        meter.add(value)
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
            one_by_one.add({"loss": value, "lr": value} if place < 2 else {"loss": value})
    kept = one_by_one.state_dict()
    assert {name: state for name, state in at_once.state_dict().items() if state["count"]} == kept
    for name in kept:
        assert repr(at_once.summary(name)) == repr(one_by_one.summaries()[name])
        assert repr(at_once.mean(name)) == repr(at_once.summary(name)["mean"])


def test_more_than_may_wait_are_taken() -> None:
    meter = Meter()
    meter.extend(float(number) for number in range(3 * PENDING_LIMIT))
    assert not meter._pending
    assert meter.summary()["global_mean"] == (3 * PENDING_LIMIT - 1) / 2


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


@given(
    values=st.lists(st.tuples(NUMBERS, st.booleans()), min_size=1, max_size=40),
    reads=st.sets(st.integers(0, 40)),
)
def test_neither_tensors_nor_early_reading_change_a_bit(values: list[tuple[float, bool]], reads: set[int]) -> None:
    plain = meter_of([value for value, _ in values])
    mixed = Meter()
    for index, (value, as_tensor) in enumerate(values):
        mixed.add(torch.tensor(value, dtype=torch.float64) if as_tensor else value)
        if index in reads:
            mixed.summary()
    assert mixed.summary() == plain.summary()
    assert mixed.state_dict() == plain.state_dict()


def test_types_are_not_rounded_to_each_other() -> None:
    large = 2**24 + 1  # the first whole number that float32 lacks
    meter = meter_of([torch.tensor(1.0), torch.tensor(large), torch.tensor(0.1, dtype=torch.float64), 0.1])
    assert meter.state_dict()["window"] == [1.0, float(large), 0.1, 0.1]


def test_tensors_are_not_read_until_asked_or_too_many() -> None:
    unreadable = torch.empty((), device="meta")  # reading it is an error
    meter = meter_of([unreadable] * PENDING_LIMIT)
    with pytest.raises(NotImplementedError):
        meter.add(unreadable)


def test_waiting_values_do_not_keep_the_graph_alive() -> None:
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    kept_for_backward = weakref.ref(hidden)
    loss = hidden.square().sum()
    meter = meter_of([loss])
    del hidden
    assert kept_for_backward() is not None  # by the graph of the loss
    del loss
    assert kept_for_backward() is None
    assert meter.summary()["latest"] == 12.0


def test_not_a_number_shows_in_every_metric_it_enters() -> None:
    meter = meter_of([1.0, math.nan, 2.0], window=3)
    summary = meter.summary()
    assert all(math.isnan(summary[name]) for name in ("median", "mean", "global_mean", "max"))
    assert summary["latest"] == 2.0
    for _ in range(3):
        meter.add(5.0)
    assert meter.summary()["median"] == 5.0


@given(
    before=st.lists(st.floats(width=64), max_size=30),
    after=st.lists(st.floats(width=64), min_size=1, max_size=30),
)
def test_a_resumed_meter_gives_the_same_bits(before: list[float], after: list[float]) -> None:
    whole = meter_of([*before, *after])
    resumed = Meter()
    resumed.load_state_dict(json.loads(json.dumps(meter_of(before).state_dict(), allow_nan=False)))
    for value in after:
        resumed.add(value)
    assert repr(resumed.summary()) == repr(whole.summary())
    assert resumed.state_dict() == whole.state_dict()


def test_meters_summarise_each_name() -> None:
    meters = Meters(window=2)
    meters.add({"loss": torch.tensor(4.0), "lr": 0.5})
    meters.add({"loss": 2.0, "lr": 0.25, "late": torch.tensor(7)})
    summaries = meters.summaries()
    assert list(summaries) == ["loss", "lr", "late"]
    assert summaries["loss"]["mean"] == 3.0
    assert summaries["lr"]["latest"] == 0.25
    assert summaries["late"]["global_mean"] == 7.0


def test_meters_resume_and_forget_what_they_had() -> None:
    def values(step: int) -> dict[str, float | Tensor]:
        return {"loss": torch.tensor(1 / (step + 1)), "lr": 0.1 * step}

    whole, first, second = Meters(), Meters(), Meters()
    second.add({"other": 1.0})
    for step in range(50):
        whole.add(values(step))
        if step < 30:
            first.add(values(step))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(30, 50):
        second.add(values(step))
    assert second.summaries() == whole.summaries()
