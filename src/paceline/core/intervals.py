"""The progress of a run and what is due. Inside, everything counts optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """How many steps are done, and what that is in epochs."""

    total_steps: int
    steps_per_epoch: int
    step: int = 0

    @property
    def epoch(self) -> float:
        """Epochs done; a fraction inside an epoch."""
        return self.step / self.steps_per_epoch

    @property
    def is_done(self) -> bool:
        return self.step >= self.total_steps

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def to_steps(epochs: float | None, steps: int | None, steps_per_epoch: int, default: float) -> float:
    """A duration in steps, from whichever unit was written; `default` is in steps. May be a fraction."""
    if steps is not None:
        return steps
    return default if epochs is None else epochs * steps_per_epoch


_SLACK = 1e-9  # counting whole periods keeps fractions from drifting; this forgives their rounding


class Triggers:
    """Actions that are due every so many steps, in the order they were added, and always after the last step."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self._items: list[tuple[float, str]] = []

    def add(self, period: float, action: str) -> None:
        """Have `action` done every `period` steps; a fraction is due at the first step that reaches it."""
        self._items.append((max(1.0, period), action))

    def due(self, step: int) -> list[str]:
        """What is to be done after `step` steps."""
        if step == self.total_steps:
            return [action for _, action in self._items]
        before = step - 1  # written out: this is asked at every step
        return [name for period, name in self._items if int(step / period + _SLACK) > int(before / period + _SLACK)]
