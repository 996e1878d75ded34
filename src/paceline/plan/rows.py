"""What a plan finds: rows of settings, with what each phase of the run needs, or why they cannot be planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from paceline.core.errors import PacelineError, RecipeError
from paceline.plan.cost import DEVICES_OF_A_MACHINE, StepCost, communication_seconds
from paceline.plan.devices import Speed
from paceline.plan.memory import Memory

Settings = Mapping[str, str]
"""The recipe keys in which rows differ, and "procs"."""


@dataclass(frozen=True)
class Combination:
    """Settings of a row."""

    settings: Settings

    @property
    def overrides(self) -> list[str]:
        """The settings as they are written on a command line."""
        return [f"{key}={value}" for key, value in self.settings.items() if key != "procs"]

    @property
    def processes(self) -> int:
        """The number of processes."""
        return int(self.settings["procs"])

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.settings.items())


@dataclass(frozen=True)
class PlannedPhase:
    """What a phase of a run needs: some of its steps, or the evaluation of a split."""

    name: str
    memory: Memory
    largest: int | None
    """The most samples that fit, of a micro-batch or a batch to evaluate; None without a limit, 0 if none fits."""
    key: str
    """The key of the recipe that sets this number."""
    share: float = 0.0
    """Of the steps of the run."""
    cost: StepCost = field(default_factory=StepCost)
    sent_bytes: int | None = None
    """What each process sends in a step; None if that is not known."""


@dataclass(frozen=True)
class Row(Combination):
    """What one combination of settings needs on each device."""

    micro_batch_size: int
    num_micro_batches: int
    """How many micro-batches a process computes in a step."""
    training: Sequence[PlannedPhase]
    evaluations: Sequence[PlannedPhase]
    precision: str
    num_steps: int | None
    """Steps of the run; None if they depend on data that is not here."""
    missing: str = ""
    """Why samples were assumed rather than read; empty if they were read."""
    num_sharing: int = 1
    """How many processes share the memory of a device: all of them on a CPU."""

    @property
    def phase(self) -> PlannedPhase:
        """The phase that needs most."""
        return max([*self.training, *self.evaluations], key=lambda phase: phase.memory.total)

    @property
    def step(self) -> PlannedPhase:
        """The phase whose steps need most."""
        return max(self.training, key=lambda phase: phase.memory.total)

    @property
    def memory(self) -> Memory:
        """What the phase that needs most needs."""
        return self.phase.memory

    @property
    def largest_micro_batch(self) -> int | None:
        """The most samples of a micro-batch whose steps fit; None without a limit, 0 if not even one fits."""
        return _fewest(self.training)

    @property
    def largest_evaluation_batch(self) -> int | None:
        """The most samples of a batch whose evaluation fits, as `largest_micro_batch`."""
        return _fewest(self.evaluations)

    @property
    def shared_bytes(self) -> int:
        """What the processes that share a device need together."""
        return self.num_sharing * self.memory.total

    def fits(self, limit: int) -> bool:
        """Whether the processes that share a device need no more than its `limit` bytes."""
        return self.shared_bytes <= limit

    def changes_to_fit(self, limit: int) -> list[str] | None:
        """The overrides with which the row fits: none if it does as it is; None if not even single samples fit."""
        changes = []
        for phases in (self.training, self.evaluations):
            if any(self.num_sharing * phase.memory.total > limit for phase in phases):
                largest = _fewest(phases)
                if not largest:
                    return None
                changes.append(f"{phases[0].key}={largest}")
        return changes


def _fewest(phases: Sequence[PlannedPhase]) -> int | None:
    """As many samples as fit in each of these phases."""
    return min((phase.largest for phase in phases if phase.largest is not None), default=None)


@dataclass(frozen=True)
class Refused(Combination):
    """A combination that cannot be planned, and why."""

    reason: str
    kind: type[PacelineError] = RecipeError
    """Of the error that says so."""


@dataclass(frozen=True)
class Unrehearsed(Refused):
    """A combination that fake tensors cannot follow: real steps can be taken."""

    micro_batch_size: int = 1
    num_micro_batches: int = 1


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

    def seconds(phase: PlannedPhase) -> tuple[float, float | None]:
        step = row.num_sharing * phase.cost.seconds(speed, is_tf32=row.precision == "tf32")  # they share its cores too
        return step, None if phase.sent_bytes is None else communication_seconds(phase.sent_bytes, row.processes, speed)

    run = sum(phase.share * max(each or 0.0 for each in (*seconds(phase), loading)) for phase in row.training)
    return Estimate(*seconds(row.step), loading, None if row.num_steps is None else row.num_steps * run)
