"""Loss scaling: losses are multiplied by a number, so that small gradients do not vanish in float16."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.core.torch_private import foreach

_LARGEST = 2.0**24  # where every gradient is zero, nothing else would end the growth


class LossScale(ABC):
    """The current scale. `update` decides about a non-finite gradient without a read by the host; all else may read."""

    kind: str
    counter: str
    """The name of `_count` in a checkpoint."""

    def __init__(self, factor: float | Tensor) -> None:
        self.factor = factor
        """What losses are multiplied by, on the device if it changes."""
        # On the host at first: as scalars they may meet a norm on a device, and what comes of that is there.
        self._count = torch.tensor(0)
        self._skipped = torch.tensor(0)

    @abstractmethod
    def update(self, norm: Tensor) -> Tensor:
        """Update the scale by the norm of the gradient, once a step; whether the scale was too high for it."""

    @abstractmethod
    def describe(self) -> str:
        """A short description."""

    @property
    def value(self) -> float:
        return float(self.factor)

    @property
    def skipped(self) -> int:
        return int(self._skipped.item())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        count = int(self._count.item())
        return {"kind": self.kind, "scale": self.value, self.counter: count, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        if state.get("kind") != self.kind:
            raise CheckpointError(
                f"the saved state of the loss scale is of the kind {repr(state.get('kind'))[:60]}, expected"
                f" {self.kind!r}: it was saved under another precision or loss scale"
            )
        scale, counts = state["scale"], (state[self.counter], state["skipped"])
        if not (isinstance(scale, float) and 0 < scale < math.inf) or any(type(n) is not int or n < 0 for n in counts):
            raise CheckpointError(f"the saved state of the loss scale is not one: {repr(dict(state))[:200]}")
        self._count, self._skipped = map(torch.tensor, counts)


class DynamicScale(LossScale):
    """As large as gradients allow: halved when they overflow, doubled after a number of clean steps in a row.

    Where they overflow at the least scale already, the scale is not to blame: the step counts as non-finite.
    """

    kind, counter = "dynamic", "clean_steps"
    factor: Tensor

    def __init__(self, value: float = 2.0**16, growth_steps: int = 2_000, least: float = 1.0) -> None:
        super().__init__(torch.tensor(value))
        self.growth_steps = growth_steps
        self.least = least

    def update(self, norm: Tensor) -> Tensor:
        scale, is_finite = self.factor, norm.isfinite()
        overflowed = ~is_finite & (scale > self.least)
        clean = torch.where(overflowed, 0, self._count + is_finite)
        grows = clean >= self.growth_steps
        grown = torch.minimum(scale * 2, scale.clamp(min=_LARGEST))
        halved = (scale / 2).clamp(min=self.least)
        self.factor = torch.where(overflowed, halved, torch.where(grows, grown, scale))
        self._count = torch.where(grows, 0, clean)
        self._skipped = self._skipped + overflowed
        return overflowed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.factor = torch.tensor(state["scale"])

    def describe(self) -> str:
        return f"dynamic loss scale, now {self.value:,g}"


class FixedScale(LossScale):
    """A constant scale. After `patience` overflows in a row it is no longer to blame: the step counts as non-finite."""

    kind, counter = "fixed", "in_a_row"

    def __init__(self, value: float, patience: int = 50) -> None:
        super().__init__(value)
        self.patience = patience

    def update(self, norm: Tensor) -> Tensor:
        is_bad = ~norm.isfinite()
        overflowed = is_bad & (self._count < self.patience)
        self._count = torch.where(is_bad, self._count + overflowed, 0)
        self._skipped = self._skipped + overflowed
        return overflowed

    def describe(self) -> str:
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
