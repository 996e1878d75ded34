"""Running metrics of training: cheap to add to at every step, read only when somebody wants to see them.

Tensors that are added wait unread, so that adding never makes the host wait for a device; all that wait are
read together when a summary is asked for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PENDING_LIMIT = 1000
"""Tensors that may wait in one meter before they are read, whether somebody asked or not."""


class Meter:
    """One metric over time: its last `window` values, and the mean of all of them since the start."""

    def __init__(self, window: int = 20) -> None:
        self._pending: list[float | Tensor] = []
        self._window: deque[float] = deque(maxlen=window)
        self._sum = 0.0
        self._count = 0

    def add(self, value: float | Tensor) -> None:
        """Take one more value: a number, or a tensor of no dimensions that is not changed afterwards."""
        if isinstance(value, Tensor) and value.requires_grad:
            value = value.detach()  # a value that waits must not keep the graph of its step alive
        self._pending.append(value)
        if len(self._pending) > PENDING_LIMIT:
            self._take(_read(self._drain()))

    def summary(self) -> dict[str, float]:
        """Median, mean, max and latest of the window, and the mean of all values; empty before the first.

        The median of an even number of values is the lower of the two in the middle, as in `torch.median`.
        A value that is not a number makes every metric it enters not a number.
        """
        self._take(_read(self._drain()))
        if not self._window:
            return {}
        ordered = sorted(self._window)
        unordered = any(math.isnan(value) for value in ordered)
        return {
            "median": math.nan if unordered else ordered[(len(ordered) - 1) // 2],
            "mean": sum(self._window) / len(self._window),
            "global_mean": self._sum / self._count,
            "max": math.nan if unordered else ordered[-1],
            "latest": self._window[-1],
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed meter needs to give the same bits, ready for JSON."""
        self._take(_read(self._drain()))
        return {
            "window": [_to_json(value) for value in self._window],
            "sum": _to_json(self._sum),
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self._pending.clear()
        self._window.clear()
        self._window.extend(float(value) for value in state["window"])
        self._sum = float(state["sum"])
        self._count = int(state["count"])

    def _drain(self) -> list[float | Tensor]:
        waiting, self._pending = self._pending, []
        return waiting

    def _take(self, values: Sequence[float]) -> None:
        for value in values:  # one by one: when values were read must not show in the last bit of the sum
            self._sum += value
        self._count += len(values)
        self._window.extend(values)


class Meters:
    """Meters by name, made when a name is first seen."""

    def __init__(self, window: int = 20) -> None:
        self._window = window
        self._meters: dict[str, Meter] = {}

    def add(self, values: Mapping[str, float | Tensor]) -> None:
        """Take one more value for each name, see `Meter.add`."""
        meters = self._meters
        for name, value in values.items():
            meter = meters.get(name)
            if meter is None:
                meter = meters[name] = Meter(self._window)
            meter.add(value)

    def summaries(self) -> dict[str, dict[str, float]]:
        """The summary of each meter, see `Meter.summary`."""
        self._read_together()
        return {name: meter.summary() for name, meter in self._meters.items()}

    def state_dict(self) -> dict[str, Any]:
        """The states of all meters by name, ready for JSON."""
        self._read_together()
        return {name: meter.state_dict() for name, meter in self._meters.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the meters of `state`, and no others."""
        self._meters = {name: Meter(self._window) for name in state}
        for name, meter in self._meters.items():
            meter.load_state_dict(state[name])

    def _read_together(self) -> None:
        waiting = [meter._drain() for meter in self._meters.values()]
        values = iter(_read([value for values in waiting for value in values]))
        for meter, pending in zip(self._meters.values(), waiting, strict=True):
            meter._take([next(values) for _ in pending])


def _read(values: Sequence[float | Tensor]) -> list[float]:
    """The numbers in the same order; one transfer for each device and type, so that none is rounded."""
    numbers = [0.0] * len(values)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            groups.setdefault((value.device, value.dtype), []).append(index)
        else:
            numbers[index] = float(value)
    for indices in groups.values():
        tensors = [value for value in (values[index] for index in indices) if isinstance(value, Tensor)]
        for index, number in zip(indices, torch.stack(tensors).tolist(), strict=True):
            numbers[index] = float(number)
    return numbers


def _to_json(value: float) -> float | str:
    """JSON has no word for what is not finite; `float` reads both forms back, bit for bit."""
    return value if math.isfinite(value) else repr(value)
