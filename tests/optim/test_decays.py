"""Each decay against torch's schedulers and hand-computed numbers."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedules import named, schedule, values
from torch.optim import lr_scheduler

from paceline.optim.lr_scheduler import Transition


def torchs(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], steps: int = 100) -> Iterator[Any]:
    """The parameter group at each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3, momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(steps):
        yield dict(optimizer.param_groups[0])
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("decay", "keys", "make"),
    [
        ("constant", {}, lambda to: lr_scheduler.ConstantLR(to, factor=1.0)),
        ("step", {"gamma": 0.5, "every_epochs": 3}, lambda to: lr_scheduler.StepLR(to, 30, 0.5)),
        ("step", {"gamma": 0.5, "every_steps": 7}, lambda to: lr_scheduler.StepLR(to, 7, 0.5)),
        (
            "multi_step",
            {"gamma": 0.2, "milestone_epochs": [3, 5.5]},
            lambda to: lr_scheduler.MultiStepLR(to, [30, 55], 0.2),
        ),
        ("multi_step", {"milestone_steps": [0, 1, 99]}, lambda to: lr_scheduler.MultiStepLR(to, [0, 1, 99], 0.1)),
        ("exponential", {"gamma": 0.97, "every_steps": 1}, lambda to: lr_scheduler.ExponentialLR(to, 0.97)),
        ("exponential", {"gamma": 0.5}, lambda to: lr_scheduler.ExponentialLR(to, 0.5**0.1)),
        ("cosine", {"floor_lr": 0.01}, lambda to: lr_scheduler.CosineAnnealingLR(to, 100, 0.01)),
        ("cosine", {"floor": 0.1}, lambda to: lr_scheduler.CosineAnnealingLR(to, 100, 0.03)),
        ("poly", {"power": 2.5}, lambda to: lr_scheduler.PolynomialLR(to, 100, 2.5)),
        ("linear", {"floor": 0.2}, lambda to: lr_scheduler.LinearLR(to, 1.0, 0.2, 100)),
        ("one_cycle", {}, lambda to: lr_scheduler.OneCycleLR(to, 0.3, 100)),
        (
            "one_cycle",
            {"pct_start": 0.45, "anneal_strategy": "linear", "div_factor": 10, "final_div_factor": 50},
            lambda to: lr_scheduler.OneCycleLR(
                to, 0.3, 100, pct_start=0.45, anneal_strategy="linear", div_factor=10, final_div_factor=50
            ),
        ),
        ("one_cycle", {"pct_start": 0.333}, lambda to: lr_scheduler.OneCycleLR(to, 0.3, 100, pct_start=0.333)),
        ("one_cycle", {"pct_start": 0.0}, lambda to: lr_scheduler.OneCycleLR(to, 0.3, 100, pct_start=0.0)),
    ],
)
def test_the_numbers_of_torch(decay: str, keys: dict[str, Any], make: Callable[..., lr_scheduler.LRScheduler]) -> None:
    expected = [group["lr"] for group in torchs(make)]
    assert values(schedule(decay, 0.3, **keys)) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("decay", "keys", "make"),
    [
        ("step", {"gamma": 0.5, "every_epochs": 7}, lambda to: lr_scheduler.StepLR(to, 7, 0.5)),
        ("exponential", {"gamma": 0.97}, lambda to: lr_scheduler.ExponentialLR(to, 0.97)),
        ("one_cycle", {"pct_start": 0.2}, lambda to: lr_scheduler.OneCycleLR(to, 0.3, 100, pct_start=0.2)),
    ],
)
def test_the_numbers_of_torch_by_epoch(
    decay: str, keys: dict[str, Any], make: Callable[..., lr_scheduler.LRScheduler]
) -> None:
    made = schedule(decay, 0.3, total_steps=700, steps_per_epoch=7, per="epoch", **keys)
    expected = [group["lr"] for group in torchs(make)]
    for within in (0, 6):
        assert values(made, range(within, 700, 7)) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("anneal", ["cos", "linear"])
def test_momentum_beside_one_cycle_is_torchs(anneal: Literal["cos", "linear"]) -> None:
    expected = torchs(lambda to: lr_scheduler.OneCycleLR(to, 0.3, 100, anneal_strategy=anneal))
    arguments = {"anneal_strategy": anneal}
    momentum = Transition(0.95, 0.85, named("inverse_one_cycle"), arguments, total_steps=100, steps_per_epoch=10)
    assert values(momentum) == pytest.approx([group["momentum"] for group in expected], rel=1e-12)


def test_a_milestone_in_tenths_of_an_epoch_is_met_exactly() -> None:
    made = schedule("multi_step", total_steps=1000, steps_per_epoch=100, milestone_epochs=[1.1, 2.3])
    assert values(made, (109, 110, 229, 230)) == pytest.approx([1, 0.1, 0.1, 0.01])
    every = schedule("step", total_steps=1000, steps_per_epoch=100, every_epochs=1.1)
    assert values(every, (109, 110, 329, 330)) == pytest.approx([1, 0.1, 0.01, 0.001])
    assert schedule("step", steps_per_epoch=7, every_epochs=0.1, gamma=0.5)(7) == 0.5**10
    assert schedule("wsd", total_steps=25, cooldown_share=0.56, shape="sqrt")(11) == 1


def test_step_cosine_falls_in_steps_then_along_a_cosine() -> None:
    made = schedule("step_cosine", milestone_steps=[20, 60], gamma=0.5)
    expected = [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25 * (1 - math.sqrt(0.5))]
    assert values(made, (0, 19, 20, 59, 60, 80, 90)) == pytest.approx(expected)


def test_f3_counts_in_updates_epochs_or_fractions_of_them() -> None:
    assert schedule("f3")(0) == pytest.approx(2 / 101)
    assert schedule("f3", per="epoch")(9) == pytest.approx(2 / 11)
    assert schedule("f3", per="fraction")(5) == pytest.approx(3 / 11)
    assert schedule("f3", per="fraction")(50) == schedule("f3", per="epoch")(50)


@pytest.mark.parametrize(
    ("keys", "steps", "expected"),
    [
        ({}, (79, 80, 90, 99), [1, 1, 0.5, 0.05]),
        ({"cooldown_share": 0.1, "shape": "cosine"}, (90, 95, 98), [1, 0.5, 0.5 * (1 + math.cos(0.8 * math.pi))]),
        ({"cooldown_epochs": 4, "shape": "sqrt"}, (60, 70, 96), [1, 0.5, 1 - math.sqrt(0.9)]),
        ({"cooldown_steps": 50, "floor": 0.5}, (50, 75), [1, 0.75]),
        ({"cooldown_steps": 50, "warmup_steps": 50}, (25, 50, 75), [0.5, 1, 0.5]),
        ({"cooldown_steps": 50, "warmup_steps": 20, "decay_from": "warmup"}, (50, 75), [1, 0.5]),
    ],
)
def test_warmup_stable_decay(keys: dict[str, Any], steps: Iterable[int], expected: list[float]) -> None:
    assert values(schedule("wsd", **keys), steps) == pytest.approx(expected)


def test_one_cycle_whose_rise_is_a_single_update_starts_at_the_top() -> None:
    assert values(
        schedule("one_cycle", total_steps=10, pct_start=0.1, anneal_strategy="linear"), (0, 9)
    ) == pytest.approx([1, 4e-6])


@pytest.mark.parametrize(
    ("decay", "keys"),
    [
        ("linear", {}),
        ("multi_step", {"milestone_steps": [0]}),
        ("step_cosine", {"milestone_steps": [0]}),
        ("exponential", {"gamma": 0.5}),
        ("wsd", {}),
        ("f3", {}),
        ("one_cycle", {}),
        ("inverse_one_cycle", {}),
    ],
)
def test_a_run_of_one_update(decay: str, keys: dict[str, Any]) -> None:
    assert 0 <= schedule(decay, total_steps=1, steps_per_epoch=1, **keys)(0) <= 1


DECAYS: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {},
    "cosine": {},
    "poly": {"power": 0.9},
    "step": {"every_epochs": 0.3},
    "multi_step": {"milestone_epochs": [0.1, 0.7]},
    "step_cosine": {"milestone_epochs": [0.1, 0.7]},
    "exponential": {"gamma": 0.5},
    "wsd": {"cooldown_share": 0.3},
    "one_cycle": {},
    "inverse_one_cycle": {},
}


@given(
    name=st.sampled_from(list(DECAYS)),
    epochs=st.integers(1, 6),
    steps_per_epoch=st.integers(10, 400),
    warmup_epochs=st.sampled_from([0, 0.1, 0.25, 0.6]),
    count_from=st.sampled_from([0, 1]),
    floor=st.sampled_from([0, 0.2]),
)
@settings(max_examples=150, deadline=None)
def test_bounds_and_that_fractions_are_as_fine_as_steps(
    name: str, epochs: int, steps_per_epoch: int, warmup_epochs: float, count_from: int, floor: float
) -> None:
    total = epochs * steps_per_epoch
    keys = DECAYS[name] | {"warmup_epochs": 0 if name == "one_cycle" else warmup_epochs, "count_from": count_from}
    made, by_fraction, by_epoch = (
        schedule(name, 0.3, total, steps_per_epoch, floor=floor, per=per, **keys)
        for per in ("step", "fraction", "epoch" if epochs > 1 else "step")
    )
    steps = range(0, total, max(1, total // 50))
    assert all(0 <= made(step) <= 0.3 + 1e-12 for step in steps)
    assert values(made, steps) == values(by_fraction, steps)
    if epochs > 1:
        assert all(by_epoch(step) == by_epoch(step - step % steps_per_epoch) for step in steps)
