"""Running statistics of training metrics; and speed and time left, by the clock: outside of what resumes exactly."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.core.world import World

_FIRST_STEPS = 3  # that are slower than the others: memory is taken, kernels are chosen


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


class StepTimer:
    """Times the steps of a run and what is done between them."""

    def __init__(self) -> None:
        self.forward_seconds = 0.0
        """What this process took for the forward passes of the step so far."""
        self.data_share = 0.0
        """The share of the last step that was spent waiting for its data."""
        self._meters = Meters()
        self._num_steps = 0
        self._waited = self._started = self._counted_since = 0.0

    def start_step(self, waited: float) -> None:
        """Start a step, after `waited` seconds for its data."""
        self._waited, self._started = waited, time.perf_counter()

    def end_step(self, num_samples: int) -> None:
        """Record the step that was started last."""
        now = time.perf_counter()
        step_time = now - self._started + self._waited
        self.data_share = self._waited / step_time
        own, self.forward_seconds = self.forward_seconds + self._waited, 0.0
        times = {"step_time": step_time, "data_time": self._waited, "own_time": own, "samples": num_samples}
        self._meters.extend({name: (value,) for name, value in times.items()})
        self._num_steps += 1
        if self._num_steps <= _FIRST_STEPS:
            self._counted_since = now

    def seconds_left(self, steps_left: int) -> float:
        """The time left, at the speed of this run since its first steps, with all that it does between steps."""
        counted = self._num_steps - _FIRST_STEPS
        if counted < 1:
            return steps_left * self._meters.summary("step_time")["mean"] if self._num_steps else 0.0
        return steps_left * (time.perf_counter() - self._counted_since) / counted

    def metrics(self, world: World, steps_left: int) -> dict[str, object]:
        """Speed, time left and memory; shares and memory are those of the worst rank.

        The slowest process is the one that needs longest for its data and its forward passes, which wait for no other.
        """
        step_time, data_time = self._meters.summary("step_time"), self._meters.summary("data_time")
        if not step_time:  # a resumed run that logs what was pending
            return {"time": time.time()}
        data_wait = data_time["mean"] / step_time["mean"]
        own = [data_wait, peak_memory(world.device) / 2**20, self._meters.summary("own_time")["mean"]]
        ranks = [own]
        if world.size > 1:
            ranks = [rank.tolist() for rank in world.gather(torch.tensor(own, dtype=torch.float64))]
        data_wait, memory, busy = map(max, zip(*ranks, strict=True))
        metrics = {
            "time": time.time(),
            "step_time": step_time,
            "data_time": data_time,
            "samples_per_second": self._meters.summary("samples")["mean"] / step_time["mean"],
            "data_wait": data_wait,
            "memory_mb": memory,
            "eta_seconds": self.seconds_left(steps_left),
        }
        if world.size > 1:
            own_times = [rank[2] for rank in ranks]
            metrics |= {"slowest_rank": own_times.index(busy), "slowest_by": busy / statistics.fmean(own_times)}
        return metrics


def peak_memory(device: torch.device) -> int:
    """The most memory used so far, in bytes: of the device, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
