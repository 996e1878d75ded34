"""Schedules for tests, said as a recipe says them."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from paceline.core.registry import register
from paceline.optim.lr_scheduler import Schedule


def named(name: str) -> Callable[..., Any]:
    entry = register.kind("schedule").find(name)
    assert entry is not None
    return entry.resolve()


def schedule(decay: str, lr: float = 1.0, total_steps: int = 100, steps_per_epoch: int = 10, **keys: Any) -> Schedule:
    """A schedule as a recipe would say it: the decay's arguments beside the common keys."""
    common = {key: keys.pop(key) for key in list(keys) if key in inspect.signature(Schedule).parameters}
    return Schedule(lr, named(decay), keys, total_steps=total_steps, steps_per_epoch=steps_per_epoch, **common)


def values(of: Callable[[int], float], steps: Iterable[int] = range(100)) -> list[float]:
    return [of(step) for step in steps]
