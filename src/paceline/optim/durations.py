"""The part of a run that a decay covers, and durations and points inside it."""

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
    """The part of a run that a decay covers. All lengths are in steps."""

    begin: float
    """Where the decay begins to count: 0, or the end of warm-up."""
    warmup: float
    """The length of warm-up."""
    total: int
    """The length of the run; that of its epochs, the last one whole, if values are held for an epoch."""
    steps_per_epoch: int
    tick: int = 1
    """The steps that one value is held for: 1, or an epoch's."""
    unit: int = 1
    """The steps in what formulas call 1: a step, or an epoch."""
    count_from: int = 0
    """The number of the first step (or epoch), 0 or 1, where its number is compared with points of the run."""

    @property
    def length(self) -> float:
        """From where the decay begins to count to the end of the run."""
        return self.total - self.begin

    @property
    def first(self) -> int:
        """What a position is counted up by before it is compared with points of the run."""
        return self.count_from * self.tick

    def duration(self, name: str, epochs: float | None, steps: float | None) -> float:
        """A duration in steps, from whichever of `name`_epochs and `name`_steps is given."""
        key, value = either(name, epochs, steps)
        if value <= 0:
            raise ArgumentError(key, f"expected a number > 0, got {value:g}")
        return self._in_steps(key, value)

    def points(self, name: str, epochs: Sequence[float] | None, steps: Sequence[float] | None) -> list[float]:
        """Points of the run in steps, from whichever unit is given: increasing, and reached by the run."""
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
        """Refuse a point, in steps, that the run does not reach; `key` tells in which unit to say so."""
        if point > self.length - self.tick + self.first:
            unit, size = ("epochs", self.steps_per_epoch) if key.endswith("_epochs") else ("steps", 1)
            length = f"the {self.length / size:g} {unit} of the run" + (" that follow warm-up" if self.begin else "")
            raise ArgumentError(key, f"expected points before the end of {length}, got {point / size:g}")

    def _in_steps(self, key: str, value: float) -> float:
        return snapped(value * self.steps_per_epoch if key.endswith("_epochs") else value)


def snapped(steps: float) -> float:
    """The whole number of steps that was meant: 1.1 epochs of 100 are 110, not 110.00000000000001."""
    return round(steps) if abs(steps - round(steps)) < _ROUNDING else steps


def either(name: str, epochs: T | None, steps: T | None) -> tuple[str, T]:
    """The one of `name`_epochs and `name`_steps that is given, behind its own name."""
    if epochs is not None and steps is not None:
        raise ArgumentError(f"{name}_steps", f"cannot be given together with {name}_epochs; keep one of them")
    if epochs is not None:
        return f"{name}_epochs", epochs
    if steps is not None:
        return f"{name}_steps", steps
    raise ArgumentError(f"{name}_epochs", f"expected this or {name}_steps, got neither")
