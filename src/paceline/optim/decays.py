"""Learning rate decays: the factor of the learning rate at a point of the run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from paceline.core.arguments import (
    AtMostOneOf,
    Count,
    CountOrZero,
    ExactlyOneOf,
    Increasing,
    NonNegative,
    PartialShare,
    Positive,
    PositiveShare,
)
from paceline.core.errors import ArgumentError
from paceline.core.registry import register
from paceline.core.text import pluralize

T = TypeVar("T")
MakeDecay = TypeVar("MakeDecay", bound=Callable[..., Any])

Decay = Callable[[float], float]
"""The factor after so many steps."""
EpochPoints = Annotated[Sequence[NonNegative], Field(min_length=1), Increasing()]
StepPoints = Annotated[Sequence[CountOrZero], Field(min_length=1), Increasing()]

_ROUNDING, _SNAP = 1e-9, 1e-6


@dataclass(frozen=True)
class Span:
    """The span of a run that a decay covers, in steps."""

    begin: float
    """Where the decay starts to count: 0, or the end of warm-up."""
    warmup: float
    """The length of warm-up."""
    total: int
    """The length of the run; rounded up to whole epochs if values change once per epoch."""
    steps_per_epoch: int
    tick: int = 1
    """Steps between changes of the value: 1, or those of an epoch."""
    unit: int = 1
    """Steps in what formulas call 1: a step, or an epoch."""
    count_from: int = 0
    """The number of the first step (or epoch), 0 or 1, in comparisons with milestones."""

    @property
    def length(self) -> float:
        """From where the decay starts to count to the end of the run."""
        return self.total - self.begin

    @property
    def first(self) -> int:
        """What is added to a position before it is compared with milestones."""
        return self.count_from * self.tick

    def duration(self, name: str, epochs: float | None, steps: float | None) -> float:
        """A duration in steps, from `name`_epochs or `name`_steps, whichever is given."""
        key, value = either(name, epochs, steps)
        if value <= 0:
            raise ArgumentError(key, f"expected a number > 0, got {value:g}")
        return self._in_steps(key, value)

    def points(self, name: str, epochs: Sequence[float] | None, steps: Sequence[float] | None) -> list[float]:
        """Milestones in steps, from whichever unit is given: increasing, and reached by the run."""
        key, values = either(name, epochs, steps)
        if not values:
            raise ArgumentError(key, "expected at least one point, got none")
        if values[0] < 0:
            raise ArgumentError(key, f"expected numbers >= 0, got {values[0]:g}")
        if problem := Increasing().problem(values):
            raise ArgumentError(key, problem)
        points = [self._in_steps(key, value) for value in values]
        self.check_reached(key, points[-1])
        return points

    def check_reached(self, key: str, point: float) -> None:
        """Raise unless the run reaches a point, in steps; the message uses the unit of `key`."""
        if point > self.length - self.tick + self.first:
            unit, size = ("epochs", self.steps_per_epoch) if key.endswith("_epochs") else ("steps", 1)
            length = f"the {self.length / size:g} {unit} of the run" + (" after warm-up" if self.begin else "")
            raise ArgumentError(key, f"expected points before the end of {length}, got {point / size:g}")

    def _in_steps(self, key: str, value: float) -> float:
        return snap(value * self.steps_per_epoch if key.endswith("_epochs") else value)


def snap(steps: float) -> float:
    """Steps without rounding errors: 1.1 epochs of 100 are 110, not 110.00000000000001."""
    return round(steps) if abs(steps - round(steps)) < _SNAP else steps


def either(name: str, epochs: T | None, steps: T | None) -> tuple[str, T]:
    """The key and value of `name`_epochs or `name`_steps, whichever is given."""
    if epochs is not None and steps is not None:
        raise ArgumentError(f"{name}_steps", f"cannot be given together with {name}_epochs; keep one of them")
    if epochs is not None:
        return f"{name}_epochs", epochs
    if steps is not None:
        return f"{name}_steps", steps
    raise ArgumentError(f"{name}_epochs", f"expected this or {name}_steps, got neither")


def _spanning(whole_run: bool = False, is_bounded: bool = False) -> Callable[[MakeDecay], MakeDecay]:
    """Mark a decay: whether it counts from the start of the run, and whether the floor cuts it off."""

    def mark(make: MakeDecay) -> MakeDecay:
        vars(make).update(whole_run=whole_run, is_bounded=is_bounded)
        return make

    return mark


@register.schedule("constant")
def constant(done: float) -> float:
    """No decay."""
    return 1.0


@register.schedule("linear")
def linear(done: float) -> float:
    """A straight line from 1 to 0."""
    return 1 - done


def half_cosine(at: float, length: float = 1.0) -> float:
    """Half a cosine, from 1 to 0."""
    # π · at first, as torch, timm, MAE and Pet do: near 0 the order shows in the learning rate.
    return 0.5 * (1 + math.cos(math.pi * at / length))


@register.schedule("cosine")
@register.schedule("half_cosine")
def cosine(span: Span) -> Decay:
    """Half a cosine, from 1 to 0."""
    return partial(half_cosine, length=span.length)


@register.schedule("poly")
def poly(done: float, power: Positive = 0.9) -> float:
    """(1 − done) ** power."""
    return float((1 - done) ** power)


def one_minus_sqrt(done: float) -> float:
    """1 − √done."""
    return 1 - math.sqrt(done)


SHAPES: dict[str, Decay] = {"linear": linear, "cosine": half_cosine, "sqrt": one_minus_sqrt}
"""Curves from 1 to 0, by name."""


@register.schedule("step", checks=[ExactlyOneOf("every_epochs", "every_steps")])
@_spanning(whole_run=True, is_bounded=True)
def step(
    span: Span, gamma: Positive = 0.1, every_epochs: Positive | None = None, every_steps: Count | None = None
) -> Decay:
    """×gamma every `every_epochs` or `every_steps`."""
    every = span.duration("every", every_epochs, every_steps)
    span.check_reached("every_epochs" if every_steps is None else "every_steps", every)
    return lambda at: float(gamma ** math.floor((at + span.first) / every + _ROUNDING))


@register.schedule("multi_step", checks=[ExactlyOneOf("milestone_epochs", "milestone_steps")])
@_spanning(whole_run=True, is_bounded=True)
def multi_step(
    span: Span,
    gamma: Positive = 0.1,
    milestone_epochs: EpochPoints | None = None,
    milestone_steps: StepPoints | None = None,
) -> Decay:
    """×gamma at each milestone."""
    milestones = span.points("milestone", milestone_epochs, milestone_steps)
    return lambda at: float(gamma ** bisect_right(milestones, at + span.first))


@register.schedule("step_cosine", checks=[ExactlyOneOf("milestone_epochs", "milestone_steps")])
@_spanning(whole_run=True, is_bounded=True)
def step_cosine(
    span: Span,
    gamma: Positive = 0.1,
    milestone_epochs: EpochPoints | None = None,
    milestone_steps: StepPoints | None = None,
) -> Decay:
    """×gamma at each milestone but the last; from there half a cosine down to 0."""
    *drops, last = span.points("milestone", milestone_epochs, milestone_steps)
    left = span.length - last
    if left <= 0:
        key, values = either("milestone", milestone_epochs, milestone_steps)
        raise ArgumentError(key, f"expected the last one, where the cosine begins, inside the run, got {values[-1]:g}")

    def factor(at: float) -> float:
        if at + span.first < last:
            return float(gamma ** bisect_right(drops, at + span.first))
        # Counted from 1, the cosine starts one step before its maximum, as in Pet; it is symmetric there.
        return float(gamma ** len(drops) * half_cosine(at - last, left))

    return factor


@register.schedule("exponential", checks=[AtMostOneOf("every_epochs", "every_steps")])
@_spanning(is_bounded=True)
def exponential(
    span: Span, gamma: Positive, every_epochs: Positive | None = None, every_steps: Count | None = None
) -> Decay:
    """×gamma per epoch, or per `every_epochs` or `every_steps`, continuously."""
    every = span.duration("every", 1 if every_epochs is None and every_steps is None else every_epochs, every_steps)
    return lambda at: float(gamma ** (at / every))


@register.schedule("wsd")
@_spanning(whole_run=True)
def warmup_stable_decay(
    span: Span,
    cooldown_share: PositiveShare | None = None,
    cooldown_epochs: Positive | None = None,
    cooldown_steps: Count | None = None,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> Decay:
    """Warm-up-stable-decay: constant, then a cool-down to 0 at the end."""
    if cooldown_epochs is None and cooldown_steps is None:
        key = "cooldown_share"
        cooldown = snap(span.total * (0.2 if cooldown_share is None else cooldown_share))
    elif cooldown_share is None:
        key = either("cooldown", cooldown_epochs, cooldown_steps)[0]
        cooldown = span.duration("cooldown", cooldown_epochs, cooldown_steps)
    else:
        raise ArgumentError("cooldown_share", "cannot be combined with cooldown_epochs or cooldown_steps")
    start = span.length - cooldown
    if start + span.begin < span.warmup:
        left = f"the {pluralize(span.total - span.warmup, 'step')} after warm-up"
        raise ArgumentError(key, f"expected a cool-down of at most {left}, got {pluralize(cooldown, 'step')}")
    curve = SHAPES[shape]
    return lambda at: 1.0 if at <= start else curve((at - start) / cooldown)


@register.schedule("f3")
@_spanning(whole_run=True, is_bounded=True)
def f3(span: Span) -> Decay:
    """Linear up to the middle of the run and down again, as in F3Net: 1 − |2(e+1)/(T+1) − 1|."""
    return lambda at: 1 - abs(2 * (at + span.unit) / (span.length + span.unit) - 1)


@register.schedule("one_cycle")
@_spanning(is_bounded=True)
def one_cycle(
    span: Span,
    pct_start: PartialShare = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: Annotated[float, Field(ge=1)] = 25.0,
    final_div_factor: Positive = 10_000.0,
) -> Decay:
    """From lr / div_factor up to lr, then down to the start's value / final_div_factor: torch's OneCycleLR."""
    if span.warmup:
        raise ArgumentError("warmup", "one_cycle has its own warm-up: set warmup to none")
    start, end = 1 / div_factor, 1 / div_factor / final_div_factor

    def factor(at: float) -> float:
        is_rising, left = _phase(span, at, pct_start, anneal_strategy)
        return 1 + (start - 1) * left if is_rising else end + (1 - end) * left

    return factor


@register.schedule("inverse_one_cycle")
def inverse_one_cycle(
    span: Span, pct_start: PartialShare = 0.3, anneal_strategy: Literal["cos", "linear"] = "cos"
) -> Decay:
    """From 1 to 0 while one_cycle rises, and back to 1 while it falls: for momentum."""

    def factor(at: float) -> float:
        is_rising, left = _phase(span, at, pct_start, anneal_strategy)
        return left if is_rising else 1 - left

    return factor


def _phase(span: Span, at: float, pct_start: float, anneal_strategy: str) -> tuple[bool, float]:
    """Whether a cycle is in its rising phase, and a curve from 1 to 0 over the phase."""
    # The last step of each phase is at its end, so phases are one step shorter than their number of steps.
    top, last = pct_start * span.length - span.tick, span.length - span.tick
    shape = half_cosine if anneal_strategy == "cos" else SHAPES[anneal_strategy]
    if at <= top and top > 0:
        return True, shape(at / top)
    return False, shape(min((at - top) / (last - top), 1.0))
