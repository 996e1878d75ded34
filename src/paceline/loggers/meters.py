"""Running statistics of training metrics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any


class Meter:
    """Statistics of one metric: over the last `window` values, and the mean since the start."""

    def __init__(self, window: int = 20) -> None:
        self._window: deque[float] = deque(maxlen=window)
        self._sum = 0.0
        self._count = 0

    def extend(self, values: Sequence[float]) -> None:
        for value in values:  # one by one: how many come at once must not show in the last bit of the sum
            self._sum += value
        self._count += len(values)
        self._window.extend(values)

    def summary(self) -> dict[str, float]:
        """Median, mean, max and latest of the window, and the mean of all values; empty without values.

        The median of an even number of values is the lower middle one, as in `torch.median`. NaN propagates.
        """
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

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values; loading it gives bit-identical summaries."""
        return {
            "window": [_to_json(value) for value in self._window],
            "sum": _to_json(self._sum),
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._window.clear()
        self._window.extend(float(value) for value in state["window"])
        self._sum = float(state["sum"])
        self._count = int(state["count"])


class Meters:
    """Meters by name, created on first use."""

    def __init__(self, window: int = 20) -> None:
        self._window = window
        self._meters: dict[str, Meter] = {}

    def extend(self, columns: Mapping[str, Sequence[float]]) -> None:
        """Add several numbers for each name, in order."""
        for name, values in columns.items():
            self._meters.setdefault(name, Meter(self._window)).extend(values)

    def summary(self, name: str) -> dict[str, float]:
        """The summary of one meter, see `Meter.summary`; empty if there is none of that name."""
        return self._meters[name].summary() if name in self._meters else {}

    def summaries(self) -> dict[str, dict[str, float]]:
        return {name: meter.summary() for name, meter in self._meters.items()}

    def state_dict(self) -> dict[str, Any]:
        return {name: meter.state_dict() for name, meter in self._meters.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; other meters are dropped."""
        self._meters = {name: Meter(self._window) for name in state}
        for name, meter in self._meters.items():
            meter.load_state_dict(state[name])


def _to_json(value: float) -> float | str:
    """A float as JSON; text if it is not finite. `float` reads both exactly."""
    return value if math.isfinite(value) else repr(value)
