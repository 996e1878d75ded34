"""Sets the optimizer to what the schedules give for a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from paceline.optim.schedules import Schedules, Transition

Setter = Callable[[dict[str, Any], int], None]


class Scheduler:
    """The learning rate of each group is the schedule's times the group's factor; momentum and decay if scheduled."""

    def __init__(self, optimizer: Optimizer, schedules: Schedules) -> None:
        self.optimizer = optimizer
        self.schedules = schedules
        self._setters: list[Setter] = []
        if schedules.momentum is not None:
            self._setters.append(_momentum_setter(optimizer, schedules.momentum))
        if schedules.weight_decay is not None:
            self._setters.append(_decay_setter(optimizer, schedules.weight_decay))

    def apply(self, step: int) -> float:
        """Set the optimizer for a step; the result is the learning rate before the groups' factors."""
        lr = self.schedules.lr(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
            for setter in self._setters:
                setter(group, step)
        return lr


def _momentum_setter(optimizer: Optimizer, momentum: Transition) -> Setter:
    if "betas" in optimizer.defaults:
        return lambda group, step: group.update(betas=(momentum(step), *group["betas"][1:]))
    if "momentum" in optimizer.defaults:
        return lambda group, step: group.update(momentum=momentum(step))
    raise ValueError(f"{type(optimizer).__name__} has no momentum to change; remove schedule.momentum")


def _decay_setter(optimizer: Optimizer, decay: Transition) -> Setter:
    """Groups without decay stay without."""
    if not any(group.get("weight_decay") for group in optimizer.param_groups):
        raise ValueError(
            "no group has weight decay to change; set optimizer.weight_decay or remove schedule.weight_decay"
        )
    decayed = {id(group["params"][0]) for group in optimizer.param_groups if group["weight_decay"]}

    def set_decay(group: dict[str, Any], step: int) -> None:
        if id(group["params"][0]) in decayed:
            group["weight_decay"] = decay(step)

    return set_decay
