"""The schedules that recipes can name, with the arguments of each decay."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from paceline.core.arguments import Arguments, Count, CountOrZero, NonNegative, PartialShare, Positive, Share
from paceline.core.registry import register
from paceline.optim.span import disorder, either

schedules = register.kind("schedule")


def _increasing(values: list[float]) -> list[float]:
    if problem := disorder(values):
        raise ValueError(problem)
    return values


def _along(points: list[list[float]]) -> list[list[float]]:
    if problem := disorder([point[0] for point in points]):
        raise ValueError(problem)
    return points


EpochPoints = Annotated[list[NonNegative], Field(min_length=1), AfterValidator(_increasing)]
StepPoints = Annotated[list[CountOrZero], Field(min_length=1), AfterValidator(_increasing)]
Factors = Annotated[
    list[Annotated[list[NonNegative], Field(min_length=2, max_length=2)]], Field(min_length=1), AfterValidator(_along)
]
"""Pairs of a point and a factor."""


class PolyArguments(Arguments):
    """Arguments of `poly`."""

    power: Positive = 0.9


class StepArguments(Arguments):
    """Arguments of `step`."""

    gamma: Positive = 0.1
    every_epochs: Positive | None = None
    every_steps: Count | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        either("every", self.every_epochs, self.every_steps)
        return self


class MilestoneArguments(Arguments):
    """Arguments of `multi_step` and `step_cosine`."""

    gamma: Positive = 0.1
    milestone_epochs: EpochPoints | None = None
    milestone_steps: StepPoints | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        either("milestone", self.milestone_epochs, self.milestone_steps)
        return self


class ExponentialArguments(Arguments):
    """Arguments of `exponential`; gamma is per epoch if neither unit is given."""

    gamma: Positive
    every_epochs: Positive | None = None
    every_steps: Count | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        either("every", 1 if self.every_steps is None else self.every_epochs, self.every_steps)
        return self


class CosineRestartsArguments(Arguments):
    """Arguments of `cosine_restarts`."""

    cycles: Count = 2


class WarmupStableDecayArguments(Arguments):
    """Arguments of `wsd`; the cool-down is a share of the run, 0.2, if nothing is given."""

    cooldown_share: Annotated[Share, Field(gt=0)] | None = None
    cooldown_epochs: Positive | None = None
    cooldown_steps: Count | None = None
    shape: Literal["linear", "cosine", "sqrt"] = "linear"


class PiecewiseArguments(Arguments):
    """Arguments of `piecewise`: pairs of a point and a factor."""

    point_epochs: Factors | None = None
    point_steps: Factors | None = None
    between: Literal["linear", "constant"] = "linear"

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        either("point", self.point_epochs, self.point_steps)
        return self


class InverseOneCycleArguments(Arguments):
    """Arguments of `inverse_one_cycle`."""

    up_share: PartialShare = 0.3
    shape: Literal["cosine", "linear"] = "cosine"


class OneCycleArguments(InverseOneCycleArguments):
    """Arguments of `one_cycle`."""

    start_divisor: Annotated[float, Field(ge=1)] = 25.0
    end_divisor: Positive = 10_000.0


_DECAYS, _CYCLES = "paceline.optim.decays", "paceline.optim.cycles"
schedules.add("constant", f"{_DECAYS}:constant", summary="the learning rate stays")
schedules.add("linear", f"{_DECAYS}:linear", summary="a straight line from the learning rate to the floor")
schedules.add("cosine", f"{_DECAYS}:cosine", summary="half a cosine from the learning rate to the floor")
schedules.add("half_cosine", f"{_DECAYS}:cosine", summary="another name of cosine")
schedules.add("poly", f"{_DECAYS}:poly", PolyArguments, "a power of what is left of the run, down to the floor")
schedules.add("step", f"{_DECAYS}:Step", StepArguments, "×gamma every so many epochs or steps")
schedules.add("multi_step", f"{_DECAYS}:MultiStep", MilestoneArguments, "×gamma at each milestone")
schedules.add(
    "step_cosine",
    f"{_DECAYS}:StepCosine",
    MilestoneArguments,
    "×gamma at each milestone but the last, then half a cosine to 0",
)
schedules.add("exponential", f"{_DECAYS}:Exponential", ExponentialArguments, "×gamma per epoch, or per so many steps")
schedules.add(
    "wsd", f"{_DECAYS}:WarmupStableDecay", WarmupStableDecayArguments, "no decay until a cool-down to the floor"
)
schedules.add("piecewise", f"{_DECAYS}:Piecewise", PiecewiseArguments, "factors at given points of the run")
schedules.add(
    "cosine_restarts", f"{_CYCLES}:CosineRestarts", CosineRestartsArguments, "half a cosine several times over"
)
schedules.add("f3", f"{_CYCLES}:F3", summary="a triangle: up to the middle of the run and down again")
schedules.add(
    "one_cycle", f"{_CYCLES}:OneCycle", OneCycleArguments, "up from a low learning rate, then down to a lower"
)
schedules.add(
    "inverse_one_cycle",
    f"{_CYCLES}:InverseOneCycle",
    InverseOneCycleArguments,
    "down while one_cycle rises and up while it falls: for momentum",
)
