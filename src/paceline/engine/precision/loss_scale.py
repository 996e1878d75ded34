"""Loss scaling: losses are multiplied by a number, so that small gradients do not vanish in float16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError

_LARGEST = 2.0**24  # where every gradient is zero, nothing else would end the growth


class LossScale(Protocol):
    """The current scale, and how it and a step with a non-finite gradient are handled."""

    value: float
    skipped: int
    """Updates left out so far."""

    def overflowed(self, norm: Tensor) -> bool:
        """Whether the step must be skipped, by the norm of its gradient; called once a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        ...

    def describe(self) -> str:
        """A short description."""
        ...


class DynamicScale:
    """As large as gradients allow: halved when they overflow, doubled after a number of clean steps in a row.

    Where they overflow at the least scale already, the scale is not to blame, and the step is not to be left out.
    """

    def __init__(self, value: float = 2.0**16, growth_steps: int = 2_000, least: float = 1.0) -> None:
        self.value = value
        self.growth_steps = growth_steps
        self.least = least
        self.clean_steps = 0
        """Updates since the scale changed last."""
        self.skipped = 0

    def overflowed(self, norm: Tensor) -> bool:
        """Whether the step must be skipped; updates the scale."""
        if math.isfinite(norm.item()):
            self.clean_steps += 1
            if self.clean_steps >= self.growth_steps:
                self.value, self.clean_steps = min(self.value * 2, max(self.value, _LARGEST)), 0
            return False
        if self.value <= self.least:
            return False
        self.value, self.clean_steps = max(self.value / 2, self.least), 0
        self.skipped += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """The scale, and how long it has lasted."""
        return {"kind": "dynamic", "scale": self.value, "clean_steps": self.clean_steps, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        _check(state, "dynamic", "clean_steps")
        self.value, self.clean_steps, self.skipped = state["scale"], state["clean_steps"], state["skipped"]

    def describe(self) -> str:
        """The kind and the current value."""
        return f"dynamic loss scale, now {self.value:,g}"


class FixedScale:
    """A constant scale. After `patience` overflows in a row no step is skipped any more: waiting does not help."""

    def __init__(self, value: float, patience: int = 50) -> None:
        self.value = value
        self.patience = patience
        self.skipped = 0
        self.in_a_row = 0

    def overflowed(self, norm: Tensor) -> bool:
        """Whether the step must be skipped."""
        if math.isfinite(norm.item()):
            self.in_a_row = 0
            return False
        if self.in_a_row >= self.patience:
            return False
        self.in_a_row += 1
        self.skipped += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """The number of skipped steps."""
        return {"kind": "fixed", "scale": self.value, "in_a_row": self.in_a_row, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; the scale stays what it was made with."""
        _check(state, "fixed", "in_a_row")
        self.in_a_row, self.skipped = state["in_a_row"], state["skipped"]

    def describe(self) -> str:
        """The value."""
        return f"loss scale {self.value:,g}"


def make_loss_scale(wanted: float | Literal["dynamic"]) -> LossScale:
    """The loss scale for a number or "dynamic"."""
    if wanted == "dynamic":
        return DynamicScale()
    if not (wanted > 0 and math.isfinite(wanted)):
        raise ValueError(f'loss scale: expected "dynamic" or a number > 0, got {wanted}')
    return FixedScale(float(wanted))


def unscale(parameters: Sequence[nn.Parameter], scale: float) -> None:
    """Divide the gradients of the parameters by the scale, in place."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and scale != 1:
        torch._foreach_mul_(gradients, 1 / scale)


def _check(state: Mapping[str, Any], kind: str, counter: str) -> None:
    if state.get("kind") != kind:
        raise CheckpointError(
            f"the saved state of the loss scale is of the kind {repr(state.get('kind'))[:60]}, expected {kind!r}:"
            " it was saved under another precision or loss scale"
        )
    scale, counts = state["scale"], (state[counter], state["skipped"])
    if not (isinstance(scale, float) and 0 < scale < math.inf) or any(type(n) is not int or n < 0 for n in counts):
        raise CheckpointError(f"the saved state of the loss scale is not one: {repr(dict(state))[:200]}")
