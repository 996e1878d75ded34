"""Making an optimizer in the fastest form that runs on the device."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.optim.fused import Group, MakesOptimizer, construct


def make_optimizer(
    optimizer: MakesOptimizer,
    parameters: Iterable[nn.Parameter] | Iterable[Group],
    lr: float,
    weight_decay: float,
    arguments: dict[str, Any],
) -> Optimizer:
    """The optimizer over groups as they are, or over those of plain parameters that learn; fused where that is faster.

    `lr` and `weight_decay` are for whatever a group does not set itself.
    """
    groups = _as_groups(parameters)
    if not any(group["params"] for group in groups):
        raise ValueError("there is nothing to learn: all parameters are frozen")
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    options |= {"lr": lr, "weight_decay": weight_decay}
    if not _takes(optimizer, "weight_decay"):
        _refuse_decay(optimizer, groups, weight_decay)
        del options["weight_decay"]
    return construct(optimizer, groups, **options)


def _as_groups(parameters: Iterable[nn.Parameter] | Iterable[Group]) -> list[Group]:
    given = list(parameters)
    groups = [dict(each) for each in given if isinstance(each, dict)]
    learning = [each for each in given if isinstance(each, nn.Parameter) and each.requires_grad]
    return groups or [{"params": learning}]


def _takes(optimizer: MakesOptimizer, name: str) -> bool:
    parameters = inspect.signature(optimizer).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _refuse_decay(optimizer: MakesOptimizer, groups: list[Group], weight_decay: float) -> None:
    asked = [value for value in (weight_decay, *(group.get("weight_decay", 0) for group in groups)) if value]
    if asked:
        name = getattr(optimizer, "__name__", str(optimizer))
        raise ValueError(f"{name} has no weight decay: expected weight_decay 0 everywhere, got {asked[0]:g}")
