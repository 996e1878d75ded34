"""Running statistics of training metrics, cheap at every step.

Tensors are kept unread, so that adding never synchronizes with a device. They are read together for a summary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PENDING_LIMIT = 1000
"""Unread tensors per meter before they are read anyway."""


class Meter:
    """Statistics of one metric: over the last `window` values, and the mean since the start."""

    def __init__(self, window: int = 20) -> None:
        self._pending: list[float | Tensor] = []
        self._window: deque[float] = deque(maxlen=window)
        self._sum = 0.0
        self._count = 0

    def add(self, value: float | Tensor) -> None:
        """Add a number, or a scalar tensor that must not change afterwards."""
        if isinstance(value, Tensor) and value.requires_grad:
            value = value.detach()  # a value that waits must not keep the graph of its step alive
        self._pending.append(value)
        if len(self._pending) > PENDING_LIMIT:
            self._take(_read(self._drain()))

    def extend(self, values: Iterable[float]) -> None:
        """Add numbers."""
        self._pending.extend(values)
        if len(self._pending) > PENDING_LIMIT:
            self._take(_read(self._drain()))

    def summary(self) -> dict[str, float]:
        """Median, mean, max and latest of the window, and the mean of all values; empty without values.

        The median of an even number of values is the lower middle one, as in `torch.median`. NaN propagates.
        """
        self._take_pending()
        if not self._window:
            return {}
        ordered, total = sorted(self._window), sum(self._window)
        unordered = math.isnan(total) and any(map(math.isnan, ordered))
        return {
            "median": math.nan if unordered else ordered[(len(ordered) - 1) // 2],
            "mean": total / len(self._window),
            "global_mean": self._sum / self._count,
            "max": math.nan if unordered else ordered[-1],
            "latest": self._window[-1],
        }

    @property
    def mean(self) -> float:
        """The mean of the window."""
        self._take_pending()
        return sum(self._window) / len(self._window)

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values; loading it gives bit-identical summaries."""
        self._take_pending()
        return {
            "window": [_to_json(value) for value in self._window],
            "sum": _to_json(self._sum),
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state."""
        self._pending.clear()
        self._window.clear()
        self._window.extend(float(value) for value in state["window"])
        self._sum = float(state["sum"])
        self._count = int(state["count"])

    def _take_pending(self) -> None:
        if self._pending:
            self._take(_read(self._drain()))

    def _drain(self) -> list[float | Tensor]:
        waiting, self._pending = self._pending, []
        return waiting

    def _take(self, values: Sequence[float]) -> None:
        for value in values:  # one by one: when values were read must not show in the last bit of the sum
            self._sum += value
        self._count += len(values)
        self._window.extend(values)


class Meters:
    """Meters by name, created on first use."""

    def __init__(self, window: int = 20) -> None:
        self._window = window
        self._meters: dict[str, Meter] = {}

    def add(self, values: Mapping[str, float | Tensor]) -> None:
        """Add one value for each name, see `Meter.add`."""
        meters = self._meters
        for name, value in values.items():
            meter = meters.get(name)
            if meter is None:
                meter = meters[name] = Meter(self._window)
            meter.add(value)

    def extend(self, columns: Mapping[str, Iterable[float]]) -> None:
        """Add several numbers for each name, in order."""
        for name, values in columns.items():
            self._meters.setdefault(name, Meter(self._window)).extend(values)

    def summary(self, name: str) -> dict[str, float]:
        """The summary of one meter, see `Meter.summary`; empty if there is none of that name."""
        return self._meters[name].summary() if name in self._meters else {}

    def mean(self, name: str) -> float:
        """The mean of one meter's window."""
        return self._meters[name].mean

    def summaries(self) -> dict[str, dict[str, float]]:
        """The summary of each meter, see `Meter.summary`."""
        self._read_together()
        return {name: meter.summary() for name, meter in self._meters.items()}

    def state_dict(self) -> dict[str, Any]:
        """The states of all meters by name, ready for JSON."""
        self._read_together()
        return {name: meter.state_dict() for name, meter in self._meters.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; other meters are dropped."""
        self._meters = {name: Meter(self._window) for name in state}
        for name, meter in self._meters.items():
            meter.load_state_dict(state[name])

    def _read_together(self) -> None:
        waiting = [meter._drain() for meter in self._meters.values()]
        values = iter(_read([value for values in waiting for value in values]))
        for meter, pending in zip(self._meters.values(), waiting, strict=True):
            meter._take([next(values) for _ in pending])


def _read(values: Sequence[float | Tensor]) -> list[float]:
    """Read the numbers in order, with one transfer per device and dtype, so that none is rounded."""
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
    """A float as JSON; text if it is not finite. `float` reads both exactly."""
    return value if math.isfinite(value) else repr(value)
