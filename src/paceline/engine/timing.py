"""How fast a run is, from the clock: outside of what resumes to the bit."""

from __future__ import annotations

import resource
import sys
import time

import torch

from paceline.core.intervals import Progress
from paceline.core.world import World
from paceline.loggers.meters import Meters


class StepTimer:
    """Times the steps of a run."""

    def __init__(self) -> None:
        self.forward_seconds = 0.0
        """What this process took for the forward passes of the step so far."""
        self.data_share = 0.0
        """The share of the last step that was spent waiting for its data."""
        self._meters = Meters()

    def add_step(self, seconds: float, waited: float, num_samples: int) -> None:
        """Take a step: `waited` for its data, then `seconds`."""
        self.data_share = waited / (waited + seconds)
        own, self.forward_seconds = self.forward_seconds + waited, 0.0
        self._meters.add({"step_time": seconds + waited, "data_time": waited, "own_time": own, "samples": num_samples})

    @property
    def step_time(self) -> float:
        """The median of the last steps, in seconds."""
        return self._meters.summaries()["step_time"]["median"]

    def metrics(self, world: World, progress: Progress) -> dict[str, object]:
        """Speed, time left and memory; shares and memory are those of the worst process.

        The slowest process is the one that needs longest for its data and its forward passes, which wait for no other.
        """
        summaries = self._meters.summaries()
        if not summaries:  # a resumed run that records what was pending
            return {"time": time.time()}
        step_time, data_time, own_time = (summaries[name] for name in ("step_time", "data_time", "own_time"))
        own = [data_time["mean"] / step_time["mean"], peak_memory(world.device) / 2**20, own_time["mean"]]
        ranks = torch.stack(world.gather(torch.tensor(own, dtype=torch.float64)))
        data_wait, memory, busy = ranks.max(0).values.tolist()
        metrics = {
            "time": time.time(),
            "step_time": step_time,
            "data_time": data_time,
            "samples_per_second": summaries["samples"]["mean"] / step_time["mean"],
            "data_wait": data_wait,
            "memory_mb": memory,
            "eta_seconds": (progress.total_steps - progress.step) * step_time["median"],
        }
        if world.size > 1:
            metrics |= {"slowest_rank": int(ranks[:, 2].argmax()), "slowest_by": busy / ranks[:, 2].mean().item()}
        return metrics


def peak_memory(device: torch.device) -> int:
    """The most memory used so far, in bytes: of the device, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
