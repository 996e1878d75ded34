"""What is planned for a step reaches every group of the optimizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.optim.decays import cosine, linear
from paceline.optim.scheduler import Scheduler
from paceline.optim.schedules import Schedule, Schedules, Transition


def groups(*settings: tuple[float, float]) -> list[dict[str, object]]:
    return [
        {"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1, "lr_scale": scale, "weight_decay": decay}
        for scale, decay in settings
    ]


def falling() -> Schedule:
    return Schedule(0.4, linear, total_steps=10, steps_per_epoch=5)


def transition(start: float, end: float, decay: Callable[[float], float] = linear) -> Transition:
    return Transition(start, end, decay, total_steps=10, steps_per_epoch=5)


def test_each_group_gets_the_rate_times_its_factor() -> None:
    optimizer = torch.optim.SGD(groups((1.0, 0.0), (0.25, 0.0)), lr=0.1)
    plan = Scheduler(optimizer, Schedules(falling()))
    assert plan.apply(5) == pytest.approx(0.2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.05])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_momentum_is_planned(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind(groups((1.0, 0.0)), lr=0.1, momentum=0.9)  # type: ignore[call-arg]
    plan = Scheduler(optimizer, Schedules(falling(), momentum=transition(0.9, 0.8)))
    plan.apply(5)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.85)


def test_momentum_of_adam_is_its_first_beta() -> None:
    optimizer = torch.optim.AdamW(groups((1.0, 0.0)), lr=0.1)
    plan = Scheduler(optimizer, Schedules(falling(), momentum=transition(0.9, 0.8)))
    plan.apply(0)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_an_optimizer_without_momentum_is_refused() -> None:
    optimizer = torch.optim.Adagrad(groups((1.0, 0.0)), lr=0.1)
    with pytest.raises(ValueError, match="no momentum"):
        Scheduler(optimizer, Schedules(falling(), momentum=transition(0.9, 0.8)))


def test_groups_without_decay_stay_without() -> None:
    optimizer = torch.optim.AdamW(groups((1.0, 0.04), (1.0, 0.0)), lr=0.1)
    decay = transition(0.04, 0.4, cosine)
    plan = Scheduler(optimizer, Schedules(falling(), weight_decay=decay))
    plan.apply(5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.22, 0.0])
    plan.apply(0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.04, 0.0])
