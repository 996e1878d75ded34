"""Schedules against golden numbers and hand-computed ones, and the scheduler that sets an optimizer."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_schedules import named, schedule, values
from torch import nn

from paceline.core.errors import ArgumentError
from paceline.optim.decays import Span, cosine, linear
from paceline.optim.lr_scheduler import LRChangeLog, Schedule, Scheduler, Transition

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())


PET: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pet steps, W=500 T=90000": (
        {"total_steps": 90_000, "steps_per_epoch": 7000, "warmup_steps": 500},
        {"milestone_steps": [60_000, 80_000]},
    ),
    "pet epochs, W=5 T=90 of 350": (
        {"total_steps": 90 * 350, "steps_per_epoch": 350, "warmup_epochs": 5},
        {"milestone_epochs": [60, 80]},
    ),
    "pet early milestone, W=500 T=2000": (
        {"total_steps": 2000, "steps_per_epoch": 300, "warmup_epochs": 5 / 3},
        {"milestone_steps": [300, 1500]},
    ),
}


@pytest.mark.parametrize("per", ["step", "fraction"])
@pytest.mark.parametrize("warmup", ["constant", "linear"])
@pytest.mark.parametrize("policy", ["step", "step_cosine", "cosine", "poly"])
@pytest.mark.parametrize("case", PET)
def test_pet(case: str, policy: str, warmup: str, per: str) -> None:
    lengths, milestones = PET[case]
    name = {"step": "multi_step"}.get(policy, policy)
    keys = lengths | ({"gamma": 0.1} | milestones if "step" in policy else {})
    pet = schedule(name, 0.001, warmup=warmup, warmup_from=0.1, count_from=1, per=per, **keys)
    golden = GOLDEN[case][f"{policy} {warmup}"]
    assert {i: pet(int(i) - 1) for i in golden} == pytest.approx(golden, rel=1e-12)


@pytest.mark.parametrize("per", ["step", "fraction"])
@pytest.mark.parametrize("decay", ["cosine", "half_cosine"])
def test_mae_at_fractional_epochs(decay: str, per: str) -> None:
    mae = schedule(decay, 2.4e-3, 400 * 312, 312, warmup="linear", warmup_epochs=40, floor_lr=1e-6, per=per)
    golden = GOLDEN["mae, 40 of 400 epochs of 312"]
    assert {step: mae(int(step)) for step in golden} == pytest.approx(golden, rel=1e-12)


@pytest.mark.parametrize(
    ("case", "decay", "keys"),
    [
        ("f3, 40 epochs", "f3", {}),
        (
            "(1+e)/W, 5 of 40 epochs",
            "constant",
            {"warmup": "linear", "warmup_from": 0, "warmup_epochs": 5, "count_from": 1},
        ),
        ("poly 0.9, 40 epochs", "poly", {"power": 0.9}),
        ("cosine, 40 epochs", "cosine", {}),
        ("exponential 0.9457, 40 epochs", "exponential", {"gamma": 0.9457}),
    ],
)
def test_per_epoch(case: str, decay: str, keys: dict[str, Any]) -> None:
    made = schedule(decay, 0.05, 40 * 7, 7, per="epoch", **keys)
    for within in (0, 1, 6):
        assert {e: made(int(e) * 7 + within) for e in GOLDEN[case]} == pytest.approx(GOLDEN[case], rel=1e-12)


def test_golden_file_is_what_the_formulas_give(tmp_path: Path) -> None:
    script = tmp_path / "make_schedules.py"
    script.write_text((Path(__file__).parents[1] / "golden" / "make_schedules.py").read_text())
    subprocess.run([sys.executable, str(script)], check=True)
    assert json.loads((tmp_path / "schedules.json").read_text()) == GOLDEN


def test_warmup_counted_from_0_and_from_1() -> None:
    from_0 = schedule("constant", 2.0, warmup="linear", warmup_steps=4, warmup_from=0.5)
    from_1 = schedule("constant", 2.0, warmup="linear", warmup_steps=4, warmup_from=0.5, count_from=1)
    assert values(from_0, range(6)) == [1.0, 1.25, 1.5, 1.75, 2.0, 2.0]
    assert values(from_1, range(6)) == [1.25, 1.5, 1.75, 2.0, 2.0, 2.0]


def test_constant_and_no_warmup() -> None:
    assert values(schedule("constant", warmup="constant", warmup_steps=2, warmup_from=0.25), range(3)) == [
        0.25,
        0.25,
        1,
    ]
    assert values(schedule("constant", warmup="none"), range(3)) == [1, 1, 1]
    tenths = schedule("constant", 1.0, 500, 100, warmup="constant", warmup_epochs=1.1, warmup_from=0.25)
    assert values(tenths, (109, 110)) == [0.25, 1]


def test_warmup_of_a_part_of_an_epoch_never_passes_the_learning_rate() -> None:
    made = schedule("constant", warmup="linear", warmup_epochs=1.5, count_from=1, per="epoch")
    assert values(made, (0, 10, 20)) == pytest.approx([1 / 1.5, 1, 1])


@pytest.mark.parametrize(
    ("decay_from", "expected"),
    [("auto", [1.0, 0.9, 0.1]), ("warmup", [1.0, 0.9, 0.1]), ("start", [0.8, 0.72, 0.08])],
)
def test_where_a_decay_begins_to_count(decay_from: str, expected: list[float]) -> None:
    made = schedule("linear", warmup="linear", warmup_steps=20, decay_from=decay_from)
    assert values(made, (20, 28, 92)) == pytest.approx(expected)
    assert made(10) == 0.5


def test_milestones_count_from_the_start_or_after_warmup() -> None:
    keys: dict[str, Any] = {"milestone_steps": [30], "gamma": 0.5, "warmup": "linear", "warmup_steps": 20}
    assert values(schedule("multi_step", **keys), (20, 29, 30)) == [1, 1, 0.5]
    assert values(schedule("multi_step", decay_from="warmup", **keys), (30, 49, 50)) == [1, 1, 0.5]


def test_a_floor_ends_a_decay_to_0_and_bounds_one_with_levels_of_its_own() -> None:
    assert values(schedule("linear", 2.0, floor=0.5), (0, 50)) == [2.0, 1.5]
    made = schedule("step", 2.0, every_steps=10, gamma=0.1, floor_lr=0.05)
    assert values(made, (0, 10, 20, 99)) == pytest.approx([2.0, 0.2, 0.05, 0.05])


def test_the_last_part_of_an_epoch_counts_as_an_epoch() -> None:
    made = schedule("linear", total_steps=25, per="epoch")
    assert values(made, (0, 9, 10, 24)) == pytest.approx([1, 1, 2 / 3, 1 / 3])


def test_past_the_end_the_last_value_stays() -> None:
    assert schedule("poly")(1000) == 0
    assert schedule("one_cycle")(100) == schedule("one_cycle")(99)


def test_transition() -> None:
    weight_decay = Transition(0.04, 0.4, named("linear"), total_steps=10, steps_per_epoch=5, per="epoch")
    assert values(weight_decay, range(10)) == pytest.approx([0.04] * 5 + [0.22] * 5)
    rising = Transition(0.0, 1.0, named("cosine"), total_steps=4, steps_per_epoch=2)
    assert values(rising, (0, 2, 4)) == pytest.approx([0, 0.5, 1])


def test_making_schedules_takes_no_torch() -> None:
    code = "import sys, paceline.optim.lr_scheduler, paceline.optim.decays\n"
    subprocess.run([sys.executable, "-c", f"{code}assert 'torch' not in sys.modules"], check=True)


def test_a_function_of_what_is_done() -> None:
    def mine(done: float, power: float = 3.0) -> float:
        return float((1 - done) ** power)

    made = Schedule(1.0, mine, {"power": 2.0}, total_steps=100, steps_per_epoch=10, warmup_steps=20)
    assert made(60) == 0.25
    assert Schedule(1.0, mine, total_steps=100, steps_per_epoch=10)(50) == 0.125


def test_a_function_of_step_epoch_and_totals() -> None:
    seen: list[Any] = []

    def mine(step: int, epoch: float, total_steps: int, total_epochs: float, done: float, power: int) -> float:
        seen.append((step, epoch, total_steps, total_epochs, done, power))
        return 0.5

    keys: dict[str, Any] = {"total_steps": 100, "steps_per_epoch": 10, "warmup_steps": 20}
    assert Schedule(2.0, mine, {"power": 3}, **keys)(65) == 1.0
    assert Schedule(2.0, mine, {"power": 3}, per="epoch", **keys)(65) == 1.0
    assert seen == [(65, 6.5, 100, 10, 45 / 80, 3), (60, 6, 100, 10, 0.5, 3)]


def test_a_class_that_checks_its_arguments() -> None:
    class Halving:
        whole_run = True
        is_bounded = True

        def __init__(self, span: Span, every_steps: int = 10) -> None:
            self.every = span.duration("every", None, every_steps)

        def __call__(self, at: float) -> float:
            return float(0.5 ** (at // self.every))

    made = Schedule(1.0, Halving, {"every_steps": 20}, total_steps=100, steps_per_epoch=10, warmup_steps=5, floor=0.1)
    assert values(made, (5, 39, 40, 99)) == [1, 0.5, 0.25, 0.1]
    with pytest.raises(ArgumentError, match=r"every_steps: .*-1"):
        Schedule(1.0, Halving, {"every_steps": -1}, total_steps=100, steps_per_epoch=10)


def test_a_function_that_asks_for_nothing_known() -> None:
    def mine(share: float) -> float:
        return share

    with pytest.raises(ArgumentError, match="decay: mine "):
        Schedule(1.0, mine, total_steps=1, steps_per_epoch=1)


def test_changes_above_the_ratio_are_reported_once() -> None:
    log = LRChangeLog()
    changes = [log(lr) for lr in (1.0, 1.0, 1.1, 1.12, 1.12, 1.0, 1.02, 0.1)]
    assert changes == [None, None, None, (1.0, 1.12), None, (1.12, 1.0), None, (1.0, 0.1)]


def test_a_jump_is_a_change_after_steps_without_one() -> None:
    log, jumps = LRChangeLog(), []
    for lr in (0.0, 0.1, 0.2, 1.0, 1.0, 1.0, 0.1, 0.1, 0.02, 0.01):  # warm-up, two milestones, a decay
        log(lr)
        jumps.append(log.jumped_from)
    assert jumps == [None, None, None, None, None, None, 1.0, None, 0.1, None]


def test_a_change_by_exactly_the_ratio_is_not_reported() -> None:
    for thousandth in range(1, 1000):
        low, high = thousandth / 1000, thousandth * 11 / 10_000
        up, down = LRChangeLog(), LRChangeLog()
        assert [up(low), up(high), up(high * 1.001)] == [None, None, (low, high * 1.001)]
        assert [down(high), down(low), down(low * 0.999)] == [None, None, (high, low * 0.999)]


def test_small_learning_rates_are_not_reported() -> None:
    log = LRChangeLog()
    assert [log(lr) for lr in (1e-6, 9.9e-8, 1e-7, 0.0, 1e-6)] == [None, None, (1e-6, 1e-7), None, (1e-7, 1e-6)]
    rising = LRChangeLog(ratio=2)
    assert [rising(lr) for lr in (0.0, 5e-8, 2e-7, 4e-7, 5e-7)] == [None, None, (0.0, 2e-7), None, (2e-7, 5e-7)]


# The scheduler


def groups(*settings: tuple[float, float]) -> list[dict[str, object]]:
    return [
        {"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1, "lr_scale": scale, "weight_decay": decay}
        for scale, decay in settings
    ]


def falling() -> Schedule:
    return Schedule(0.4, linear, total_steps=10, steps_per_epoch=5)


def transition(start: float, end: float, decay: Callable[..., Any] = linear) -> Transition:
    return Transition(start, end, decay, total_steps=10, steps_per_epoch=5)


def test_each_group_gets_the_rate_times_its_factor() -> None:
    optimizer = torch.optim.SGD(groups((1.0, 0.0), (0.25, 0.0)), lr=0.1)
    scheduler = Scheduler(optimizer, falling())
    assert scheduler.apply(5) == pytest.approx(0.2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.05])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_momentum_is_scheduled(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind(groups((1.0, 0.0)), lr=0.1, momentum=0.9)  # type: ignore[call-arg]
    scheduler = Scheduler(optimizer, falling(), momentum=transition(0.9, 0.8))
    scheduler.apply(5)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.85)


def test_momentum_of_adam_is_its_first_beta() -> None:
    optimizer = torch.optim.AdamW(groups((1.0, 0.0)), lr=0.1)
    scheduler = Scheduler(optimizer, falling(), momentum=transition(0.9, 0.8))
    scheduler.apply(0)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_an_optimizer_without_momentum_is_refused() -> None:
    optimizer = torch.optim.Adagrad(groups((1.0, 0.0)), lr=0.1)
    with pytest.raises(ValueError, match="no momentum"):
        Scheduler(optimizer, falling(), momentum=transition(0.9, 0.8))


def test_groups_without_decay_stay_without() -> None:
    optimizer = torch.optim.AdamW(groups((1.0, 0.04), (1.0, 0.0)), lr=0.1)
    decay = transition(0.04, 0.4, cosine)
    scheduler = Scheduler(optimizer, falling(), weight_decay=decay)
    scheduler.apply(5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.22, 0.0])
    scheduler.apply(0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.04, 0.0])
