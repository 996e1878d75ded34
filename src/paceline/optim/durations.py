"""The span of a run that a decay covers, and durations and milestones inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.arguments import Increasing
from paceline.core.errors import ArgumentError

T = TypeVar("T")

_ROUNDING = 1e-6


@dataclass(frozen=True)
class Span:
    """The span of a run that a decay covers, in steps."""

    begin: float
    """Where the decay starts to count: 0, or the end of warm-up."""
    warmup: float
    """The length of warm-up."""
    total: int
    """The length of the run; rounded up to whole epochs if values change once per epoch."""
    steps_per_epoch: int
    tick: int = 1
    """Steps between changes of the value: 1, or those of an epoch."""
    unit: int = 1
    """Steps in what formulas call 1: a step, or an epoch."""
    count_from: int = 0
    """The number of the first step (or epoch), 0 or 1, in comparisons with milestones."""

    @property
    def length(self) -> float:
        """From where the decay starts to count to the end of the run."""
        return self.total - self.begin

    @property
    def first(self) -> int:
        """What is added to a position before it is compared with milestones."""
        return self.count_from * self.tick

    def duration(self, name: str, epochs: float | None, steps: float | None) -> float:
        """A duration in steps, from `name`_epochs or `name`_steps, whichever is given."""
        key, value = either(name, epochs, steps)
        if value <= 0:
            raise ArgumentError(key, f"expected a number > 0, got {value:g}")
        return self._in_steps(key, value)

    def points(self, name: str, epochs: Sequence[float] | None, steps: Sequence[float] | None) -> list[float]:
        """Milestones in steps, from whichever unit is given: increasing, and reached by the run."""
        key, values = either(name, epochs, steps)
        if not values:
            raise ArgumentError(key, "expected at least one point, got none")
        if values[0] < 0:
            raise ArgumentError(key, f"expected numbers >= 0, got {values[0]:g}")
        if problem := Increasing().problem(values):
            raise ArgumentError(key, problem)
        points = [self._in_steps(key, value) for value in values]
        self.check_reached(key, points[-1])
        return points

    def check_reached(self, key: str, point: float) -> None:
        """Raise unless the run reaches a point, in steps; the message uses the unit of `key`."""
        if point > self.length - self.tick + self.first:
            unit, size = ("epochs", self.steps_per_epoch) if key.endswith("_epochs") else ("steps", 1)
            length = f"the {self.length / size:g} {unit} of the run" + (" after warm-up" if self.begin else "")
            raise ArgumentError(key, f"expected points before the end of {length}, got {point / size:g}")

    def _in_steps(self, key: str, value: float) -> float:
        return snap(value * self.steps_per_epoch if key.endswith("_epochs") else value)


def snap(steps: float) -> float:
    """Steps without rounding errors: 1.1 epochs of 100 are 110, not 110.00000000000001."""
    return round(steps) if abs(steps - round(steps)) < _ROUNDING else steps


def either(name: str, epochs: T | None, steps: T | None) -> tuple[str, T]:
    """The key and value of `name`_epochs or `name`_steps, whichever is given."""
    if epochs is not None and steps is not None:
        raise ArgumentError(f"{name}_steps", f"cannot be given together with {name}_epochs; keep one of them")
    if epochs is not None:
        return f"{name}_epochs", epochs
    if steps is not None:
        return f"{name}_steps", steps
    raise ArgumentError(f"{name}_epochs", f"expected this or {name}_steps, got neither")
