"""Learning-rate schedules: pure functions of progress, so that resuming needs only the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Decay = Callable[[float], float]
"""From the share of the decay that is done, 0 to 1, to the share of the learning rate that is left."""


def constant(done: float) -> float:
    """No decay."""
    return 1.0


def cosine(done: float) -> float:
    """Half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * done))


def linear(done: float) -> float:
    """A straight line."""
    return 1 - done


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every update: linear warm-up from a share of it, then decay to a floor."""

    lr: float
    decay: Decay
    total_steps: int
    steps_per_epoch: int
    warmup_steps: float = 0
    warmup_from: float = 0
    floor: float = 0
    per_epoch: bool = False

    def __call__(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0."""
        at: float = step // self.steps_per_epoch * self.steps_per_epoch if self.per_epoch else step
        if at < self.warmup_steps:
            return self.lr * (self.warmup_from + (1 - self.warmup_from) * at / self.warmup_steps)
        done = (at - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.lr * (self.floor + (1 - self.floor) * self.decay(done))
