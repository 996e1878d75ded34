"""The loss scale: its course written out by hand, and what is done about gradients that are not finite."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.core.errors import CheckpointError
from paceline.engine.precision.loss_scale import DynamicScale, FixedScale, LossScale, make_loss_scale, unscale

FINE, INFINITE, UNDEFINED = torch.tensor(1.5), torch.tensor(float("inf")), torch.tensor(float("nan"))


def course(scale: LossScale, norms: str) -> list[tuple[float, bool]]:
    """The scale after each step, and whether it was left out: "." is a finite norm, "x" an infinite one, "n" NaN."""
    kinds = {".": FINE, "x": INFINITE, "n": UNDEFINED}
    found = []
    for norm in norms:
        skipped = bool(scale.update(kinds[norm]))
        found.append((scale.value, skipped))
    return found


def test_the_scale_halves_at_each_overflow_and_doubles_after_clean_updates_in_a_row() -> None:
    scale = DynamicScale(value=8.0, growth_steps=3)
    found = course(scale, "..." + "..x" + "nx" + "...." + "..")
    values = [8, 8, 16, 16, 16, 8, 4, 2, 2, 2, 4, 4, 4, 8]
    skips = [*[False] * 5, True, True, True, *[False] * 6]
    assert found == list(zip(values, skips, strict=True))
    assert scale.skipped == 3


def test_by_default_it_begins_at_65536_and_doubles_with_the_2000th_clean_update() -> None:
    scale = make_loss_scale("dynamic")
    assert scale.value == 65536
    assert {value for value, _ in course(scale, "." * 1999)} == {65536}
    assert course(scale, ".") == [(131072, False)]
    assert course(scale, "x") == [(65536, True)]


def test_at_the_least_scale_an_overflow_is_left_to_the_check_that_ends_the_run() -> None:
    scale = DynamicScale(value=4.0)
    assert course(scale, "xxxx") == [(2, True), (1, True), (1, False), (1, False)]
    assert course(DynamicScale(value=24.0, least=10.0), "xxx") == [(12, True), (10, True), (10, False)]


def test_growth_has_an_end() -> None:
    assert course(DynamicScale(value=2.0**23, growth_steps=1), "...") == [(2.0**24, False)] * 3


def test_a_fixed_scale_stays_and_gives_up_after_overflows_in_a_row() -> None:
    scale = make_loss_scale(128)
    assert course(scale, "x" * 49 + "." + "n" * 50) == [
        *[(128, True)] * 49,
        (128, False),
        *[(128, True)] * 50,
    ]
    assert course(scale, "x") == [(128, False)]
    assert scale.skipped == 99


@given(st.text(".xn", max_size=60), st.integers(0, 60), st.sampled_from(["dynamic", "fixed"]))
def test_a_saved_and_restored_scale_goes_on_as_if_nothing_had_happened(norms: str, cut: int, kind: str) -> None:
    def fresh() -> LossScale:
        return DynamicScale(value=64.0, growth_steps=4) if kind == "dynamic" else FixedScale(64.0, patience=3)

    expected = course(fresh(), norms)
    first, second = fresh(), fresh()
    found = course(first, norms[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.value == first.value
    assert found + course(second, norms[cut:]) == expected


@pytest.mark.parametrize("state", [{}, {"kind": "fixed", "scale": 1.0, "in_a_row": 0, "skipped": 0}])
def test_the_state_of_another_kind_of_scale_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="expected 'dynamic'"):
        DynamicScale().load_state_dict(state)


@pytest.mark.parametrize("wanted", [0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_no_gradient_survives_is_refused(wanted: float) -> None:
    with pytest.raises(ValueError, match="a number > 0"):
        make_loss_scale(wanted)


def test_gradients_are_divided_where_there_are_any() -> None:
    trainable, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    trainable.grad = torch.tensor([2.0, -1024.0])
    unscale([trainable, frozen], 1024.0)
    assert trainable.grad.tolist() == [2 / 1024, -1]
    assert frozen.grad is None
    unscale([frozen], 2.0)
