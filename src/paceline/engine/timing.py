"""Speed and time left of a run, from the clock: outside of what resumes bit-identically."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from paceline.core.world import World
from paceline.loggers.meters import Meters

_FIRST_STEPS = 3  # that are slower than the others: memory is taken, kernels are chosen
_SHARE_REMEMBERED = 0.1  # of a run's steps, in the average that the time left is estimated from
_LEAST_REMEMBERED = 50
_ACTIONS_REMEMBERED = 5  # of a kind; their median leaves out one that a busy moment made long


class StepTimer:
    """Times the steps of a run and what is done between them."""

    def __init__(self) -> None:
        self.forward_seconds = 0.0
        """What this process took for the forward passes of the step so far."""
        self.data_share = 0.0
        """The share of the last step that was spent waiting for its data."""
        self._meters = Meters()
        self._num_steps = 0
        self._average = 0.0  # seconds of a step, over the last part of the run
        self._actions: dict[str, deque[float]] = {}
        self._waited = self._started = 0.0

    def start_step(self, waited: float) -> None:
        """Start a step, after `waited` seconds for its data."""
        self._waited, self._started = waited, time.perf_counter()

    def end_step(self, num_samples: int, total_steps: int) -> None:
        self.add_step(time.perf_counter() - self._started, self._waited, num_samples, total_steps)

    def add_step(self, seconds: float, waited: float, num_samples: int, total_steps: int) -> None:
        """Record a step of a run of `total_steps`: `waited` for its data, then `seconds`."""
        self.data_share = waited / (waited + seconds)
        own, self.forward_seconds = self.forward_seconds + waited, 0.0
        step_time = seconds + waited
        times = {"step_time": step_time, "data_time": waited, "own_time": own, "samples": num_samples}
        self._meters.extend({name: (value,) for name, value in times.items()})
        self._num_steps += 1
        known = self._num_steps - _FIRST_STEPS
        weight = 1.0 if known < 1 else max(1 / known, 1 / max(_LEAST_REMEMBERED, _SHARE_REMEMBERED * total_steps))
        self._average += weight * (step_time - self._average)

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """Time what happens between two steps: a save, an evaluation, a line of the log."""
        started = time.perf_counter()
        yield
        self.add_action(name, time.perf_counter() - started)

    def add_action(self, name: str, seconds: float) -> None:
        """Record what happened between two steps."""
        self._actions.setdefault(name, deque(maxlen=_ACTIONS_REMEMBERED)).append(seconds)

    def seconds_left(self, steps_left: int, actions_left: Mapping[str, int]) -> float:
        """The time left: for the steps, and for what is done between them as far as it was done before."""
        return steps_left * self._average + sum(
            number * statistics.median(self._actions.get(name, [0.0])) for name, number in actions_left.items()
        )

    def metrics(self, world: World, seconds_left: float) -> dict[str, object]:
        """Speed, time left and memory; shares and memory are those of the worst rank.

        The slowest process is the one that needs longest for its data and its forward passes, which wait for no other.
        """
        step_time, data_time = self._meters.summary("step_time"), self._meters.summary("data_time")
        if not step_time:  # a resumed run that logs what was pending
            return {"time": time.time()}
        data_wait = data_time["mean"] / step_time["mean"]
        own = [data_wait, peak_memory(world.device) / 2**20, self._meters.mean("own_time")]
        ranks = [own]
        if world.size > 1:
            ranks = [rank.tolist() for rank in world.gather(torch.tensor(own, dtype=torch.float64))]
        data_wait, memory, busy = map(max, zip(*ranks, strict=True))
        metrics = {
            "time": time.time(),
            "step_time": step_time,
            "data_time": data_time,
            "samples_per_second": self._meters.mean("samples") / step_time["mean"],
            "data_wait": data_wait,
            "memory_mb": memory,
            "eta_seconds": seconds_left,
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
