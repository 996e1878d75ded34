"""The time of steps and of a run, estimated, beside the speed at which this machine loads samples."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from paceline.core.errors import DataError
from paceline.core.process import num_cores
from paceline.core.text import evenly_spaced
from paceline.core.world import World
from paceline.data.loader_profile import profile_loader
from paceline.plan.communication import DEVICES_OF_A_MACHINE, communication_seconds
from paceline.plan.devices import Speed
from paceline.plan.rows import PlannedPhase, Row
from paceline.recipe.build import Builder
from paceline.recipe.build_data import make_split_loader
from paceline.recipe.validate import CheckedRecipe

_SAMPLES = 32  # that are loaded to measure the loader


class Estimate(NamedTuple):
    """Seconds, if the device reaches the efficiency that is assumed, and evaluations and saves take no time."""

    step: float
    """To compute a step."""
    communication: float | None
    """To send what a step sends, side by side with computing; None if no link or no strategy is known."""
    loading: float | None
    """To load the samples of a step, side by side with computing; None if the loader was not measured."""
    run: float | None
    """All steps of the run; None if their number is not known."""

    @property
    def bound(self) -> Literal["compute", "communication", "data", "unknown"]:
        """What a step waits for."""
        if self.loading is None:
            return "unknown"
        if self.loading > max(self.step, self.communication or 0.0):
            return "data"
        return "communication" if self.communication and self.communication > self.step else "compute"


def estimate(row: Row, speed: Speed, samples_per_second: float | None) -> Estimate:
    """The time of a row on a device of this speed, whose machine loads so many samples a second.

    A step is one of the phase whose steps need most memory; a run has those of all phases.
    """
    samples = row.micro_batch_size * row.num_micro_batches * min(row.processes, DEVICES_OF_A_MACHINE)
    loading = None if samples_per_second is None else samples / samples_per_second
    times = {phase.name: _phase_seconds(row, phase, speed) for phase in row.training}
    slowest = (phase.share * max(seconds or 0.0 for seconds in (*times[phase.name], loading)) for phase in row.training)
    step, sending = times[row.step.name]
    return Estimate(step, sending, loading, None if row.num_steps is None else row.num_steps * sum(slowest))


def _phase_seconds(row: Row, phase: PlannedPhase, speed: Speed) -> tuple[float, float | None]:
    """How long a step of a phase takes to compute, and what it sends to send."""
    step = row.num_sharing * phase.cost.seconds(speed, is_tf32=row.precision == "tf32")  # they share its cores too
    return step, None if phase.sent_bytes is None else communication_seconds(phase.sent_bytes, row.processes, speed)


def measure_loader(checked: CheckedRecipe) -> float | None:
    """The samples of the training data that all cores of this machine load in a second; None without the data."""
    builder = Builder(checked, World(0, 1, 0, torch.device("cpu")), trains=False)
    try:
        loader = make_split_loader(builder, "train", checked.recipe.data.train)
        ids = evenly_spaced(len(loader.dataset), min(_SAMPLES, len(loader.dataset)))
        return profile_loader(loader, ids, num_cores()).samples_per_second
    except DataError:
        return None
