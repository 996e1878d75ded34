"""Loss scaling: losses are multiplied by a number, so that small gradients do not vanish in float16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.core.torch_private import foreach

_LARGEST = 2.0**24  # where every gradient is zero, nothing else would end the growth


class LossScale(Protocol):
    """The current scale, and how it and a step with a non-finite gradient are handled, without a read by the host."""

    @property
    def factor(self) -> float | Tensor:
        """What losses are multiplied by, on the device if it changes."""
        ...

    @property
    def value(self) -> float:
        """The factor as a number; reads it from the device."""
        ...

    @property
    def skipped(self) -> int:
        """Updates left out so far; reads it from the device."""
        ...

    def update(self, norm: Tensor) -> Tensor:
        """Update the scale by the norm of the gradient, once a step; whether the scale was too high for it."""
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

    Where they overflow at the least scale already, the scale is not to blame: the step counts as non-finite.
    """

    def __init__(self, value: float = 2.0**16, growth_steps: int = 2_000, least: float = 1.0) -> None:
        self.growth_steps = growth_steps
        self.least = least
        # On the host at first: as scalars they may meet a norm on a device, and what comes of that is there.
        self._scale = torch.tensor(value)
        self._clean_steps = torch.tensor(0)
        """Updates since the scale changed last."""
        self._skipped = torch.tensor(0)

    @property
    def factor(self) -> Tensor:
        """The scale, on the device."""
        return self._scale

    @property
    def value(self) -> float:
        """The scale as a number."""
        return self._scale.item()

    @property
    def skipped(self) -> int:
        """Updates left out so far."""
        return int(self._skipped.item())

    def update(self, norm: Tensor) -> Tensor:
        """Update the scale; whether it was too high for this step."""
        scale, is_finite = self._scale, norm.isfinite()
        overflowed = ~is_finite & (scale > self.least)
        clean = torch.where(overflowed, 0, self._clean_steps + is_finite)
        grows = clean >= self.growth_steps
        grown = torch.minimum(scale * 2, scale.clamp(min=_LARGEST))
        halved = (scale / 2).clamp(min=self.least)
        self._scale = torch.where(overflowed, halved, torch.where(grows, grown, scale))
        self._clean_steps = torch.where(grows, 0, clean)
        self._skipped = self._skipped + overflowed
        return overflowed

    def state_dict(self) -> dict[str, Any]:
        """The scale, and how long it has lasted."""
        clean_steps = int(self._clean_steps.item())
        return {"kind": "dynamic", "scale": self.value, "clean_steps": clean_steps, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        _check(state, "dynamic", "clean_steps")
        self._scale = torch.tensor(state["scale"])
        self._clean_steps = torch.tensor(state["clean_steps"])
        self._skipped = torch.tensor(state["skipped"])

    def describe(self) -> str:
        """The kind and the current value."""
        return f"dynamic loss scale, now {self.value:,g}"


class FixedScale:
    """A constant scale. After `patience` overflows in a row it is no longer to blame: the step counts as non-finite."""

    def __init__(self, value: float, patience: int = 50) -> None:
        self.value = value
        self.patience = patience
        self._in_a_row = torch.tensor(0)
        self._skipped = torch.tensor(0)

    @property
    def factor(self) -> float:
        """The scale."""
        return self.value

    @property
    def skipped(self) -> int:
        """Updates left out so far."""
        return int(self._skipped.item())

    def update(self, norm: Tensor) -> Tensor:
        """Count the overflow; whether the scale was too high for this step."""
        is_bad = ~norm.isfinite()
        overflowed = is_bad & (self._in_a_row < self.patience)
        self._in_a_row = torch.where(is_bad, self._in_a_row + overflowed, 0)
        self._skipped = self._skipped + overflowed
        return overflowed

    def state_dict(self) -> dict[str, Any]:
        """The number of skipped steps."""
        in_a_row = int(self._in_a_row.item())
        return {"kind": "fixed", "scale": self.value, "in_a_row": in_a_row, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; the scale stays what it was made with."""
        _check(state, "fixed", "in_a_row")
        self._in_a_row, self._skipped = torch.tensor(state["in_a_row"]), torch.tensor(state["skipped"])

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


def unscale(parameters: Sequence[nn.Parameter], scale: float | Tensor) -> None:
    """Divide the gradients of the parameters by the scale, in place."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and (isinstance(scale, Tensor) or scale != 1):
        foreach("mul_", gradients, 1 / scale)


def _check(state: Mapping[str, Any], kind: str, counter: str) -> None:
    if state.get("kind") != kind:
        raise CheckpointError(
            f"the saved state of the loss scale is of the kind {repr(state.get('kind'))[:60]}, expected {kind!r}:"
            " it was saved under another precision or loss scale"
        )
    scale, counts = state["scale"], (state[counter], state["skipped"])
    if not (isinstance(scale, float) and 0 < scale < math.inf) or any(type(n) is not int or n < 0 for n in counts):
        raise CheckpointError(f"the saved state of the loss scale is not one: {repr(dict(state))[:200]}")
