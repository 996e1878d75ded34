"""Learning rate decays: the factor of the learning rate at a point of the run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

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
from paceline.optim.durations import Span, either, snap

EpochPoints = Annotated[Sequence[NonNegative], Field(min_length=1), Increasing()]
StepPoints = Annotated[Sequence[CountOrZero], Field(min_length=1), Increasing()]
Factors = Annotated[
    Sequence[Annotated[Sequence[NonNegative], Field(min_length=2, max_length=2)]], Field(min_length=1), Increasing()
]
"""Pairs of a point and a factor."""

_ROUNDING = 1e-9


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
class Cosine:
    """Half a cosine, from 1 to 0."""

    def __init__(self, span: Span) -> None:
        self._length = span.length

    def __call__(self, at: float) -> float:
        """The factor after `at` steps."""
        return half_cosine(at, self._length)


@register.schedule("poly")
def poly(done: float, power: Positive = 0.9) -> float:
    """(1 − done) ** power."""
    return float((1 - done) ** power)


def one_minus_sqrt(done: float) -> float:
    """1 − √done."""
    return 1 - math.sqrt(done)


SHAPES: dict[str, Callable[[float], float]] = {"linear": linear, "cosine": half_cosine, "sqrt": one_minus_sqrt}
"""Curves from 1 to 0, by name."""


@register.schedule("step", checks=[ExactlyOneOf("every_epochs", "every_steps")])
class Step:
    """×gamma every `every_epochs` or `every_steps`."""

    whole_run = True
    is_bounded = True

    def __init__(
        self, span: Span, gamma: Positive = 0.1, every_epochs: Positive | None = None, every_steps: Count | None = None
    ) -> None:
        self._every = span.duration("every", every_epochs, every_steps)
        span.check_reached("every_epochs" if every_steps is None else "every_steps", self._every)
        self._gamma, self._first = gamma, span.first

    def __call__(self, at: float) -> float:
        """The factor after `at` steps."""
        return self._gamma ** math.floor((at + self._first) / self._every + _ROUNDING)


@register.schedule("multi_step", checks=[ExactlyOneOf("milestone_epochs", "milestone_steps")])
class MultiStep:
    """×gamma at each milestone."""

    whole_run = True
    is_bounded = True

    def __init__(
        self,
        span: Span,
        gamma: Positive = 0.1,
        milestone_epochs: EpochPoints | None = None,
        milestone_steps: StepPoints | None = None,
    ) -> None:
        self._milestones = span.points("milestone", milestone_epochs, milestone_steps)
        self._gamma, self._first = gamma, span.first

    def __call__(self, at: float) -> float:
        """The factor after `at` steps."""
        return self._gamma ** bisect_right(self._milestones, at + self._first)


@register.schedule("step_cosine", checks=[ExactlyOneOf("milestone_epochs", "milestone_steps")])
class StepCosine:
    """×gamma at each milestone but the last; from there half a cosine down to 0."""

    whole_run = True
    is_bounded = True

    def __init__(
        self,
        span: Span,
        gamma: Positive = 0.1,
        milestone_epochs: EpochPoints | None = None,
        milestone_steps: StepPoints | None = None,
    ) -> None:
        *self._drops, self._last = span.points("milestone", milestone_epochs, milestone_steps)
        self._left = span.length - self._last
        if self._left <= 0:
            key, values = either("milestone", milestone_epochs, milestone_steps)
            raise ArgumentError(
                key, f"expected the last one, where the cosine begins, inside the run, got {values[-1]:g}"
            )
        self._gamma, self._first = gamma, span.first

    def __call__(self, at: float) -> float:
        """The factor after `at` steps."""
        if at + self._first < self._last:
            return self._gamma ** bisect_right(self._drops, at + self._first)
        # Counted from 1, the cosine starts one step before its maximum, as in Pet; it is symmetric there.
        return self._gamma ** len(self._drops) * half_cosine(at - self._last, self._left)


@register.schedule("exponential", checks=[AtMostOneOf("every_epochs", "every_steps")])
class Exponential:
    """×gamma per epoch, or per `every_epochs` or `every_steps`, continuously."""

    is_bounded = True

    def __init__(
        self, span: Span, gamma: Positive, every_epochs: Positive | None = None, every_steps: Count | None = None
    ) -> None:
        if every_epochs is None and every_steps is None:
            every_epochs = 1
        self._every = span.duration("every", every_epochs, every_steps)
        self._gamma = gamma

    def __call__(self, at: float) -> float:
        """The factor after `at` steps."""
        return float(self._gamma ** (at / self._every))


@register.schedule("wsd")
class WarmupStableDecay:
    """Warm-up-stable-decay: constant, then a cool-down to 0 at the end."""

    whole_run = True

    def __init__(
        self,
        span: Span,
        cooldown_share: PositiveShare | None = None,
        cooldown_epochs: Positive | None = None,
        cooldown_steps: Count | None = None,
        shape: Literal["linear", "cosine", "sqrt"] = "linear",
    ) -> None:
        if cooldown_epochs is None and cooldown_steps is None:
            key = "cooldown_share"
            self._cooldown = snap(span.total * (0.2 if cooldown_share is None else cooldown_share))
        elif cooldown_share is None:
            key = either("cooldown", cooldown_epochs, cooldown_steps)[0]
            self._cooldown = span.duration("cooldown", cooldown_epochs, cooldown_steps)
        else:
            raise ArgumentError("cooldown_share", "cannot be combined with cooldown_epochs or cooldown_steps")
        self._start = span.length - self._cooldown
        if self._start + span.begin < span.warmup:
            left = f"the {pluralize(span.total - span.warmup, 'step')} after warm-up"
            raise ArgumentError(key, f"expected a cool-down of at most {left}, got {pluralize(self._cooldown, 'step')}")
        self._shape = SHAPES[shape]

    def __call__(self, at: float) -> float:
        """The factor after `at` steps."""
        return 1.0 if at <= self._start else self._shape((at - self._start) / self._cooldown)


@register.schedule("piecewise", checks=[ExactlyOneOf("point_epochs", "point_steps")])
class Piecewise:
    """Through given points: linear between them, or constant until the next."""

    whole_run = True
    is_bounded = True

    def __init__(
        self,
        span: Span,
        point_epochs: Factors | None = None,
        point_steps: Factors | None = None,
        between: Literal["linear", "constant"] = "linear",
    ) -> None:
        places = [None if points is None else [point[0] for point in points] for points in (point_epochs, point_steps)]
        self._points = span.points("point", *places)
        self._factors = [point[1] for point in either("point", point_epochs, point_steps)[1]]
        self._is_linear, self._first = between == "linear", span.first

    def __call__(self, at: float) -> float:
        """The factor after `at` steps."""
        at += self._first
        after = bisect_right(self._points, at)
        if after == 0:
            return self._factors[0]
        before = after - 1
        if after == len(self._points) or not self._is_linear:
            return self._factors[before]
        fraction = (at - self._points[before]) / (self._points[after] - self._points[before])
        return self._factors[before] + (self._factors[after] - self._factors[before]) * fraction


@register.schedule("cosine_restarts")
class CosineRestarts:
    """Half a cosine `cycles` times, each from 1."""

    def __init__(self, span: Span, cycles: Count = 2) -> None:
        self._cycles, self._length = cycles, span.length

    def __call__(self, at: float) -> float:
        """The factor after `at` steps."""
        cycle = at * self._cycles / self._length
        return half_cosine(cycle - min(math.floor(cycle), self._cycles - 1))


@register.schedule("f3")
class F3:
    """Linear up to the middle of the run and down again, as in F3Net: 1 − |2(e+1)/(T+1) − 1|."""

    whole_run = True
    is_bounded = True

    def __init__(self, span: Span) -> None:
        self._unit, self._whole = span.unit, span.length + span.unit

    def __call__(self, at: float) -> float:
        """The factor after `at` steps."""
        return 1 - abs(2 * (at + self._unit) / self._whole - 1)


@register.schedule("one_cycle")
class OneCycle:
    """From lr / div_factor up to lr, then down to the start's value / final_div_factor: torch's OneCycleLR."""

    is_bounded = True

    def __init__(
        self,
        span: Span,
        pct_start: PartialShare = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        div_factor: Annotated[float, Field(ge=1)] = 25.0,
        final_div_factor: Positive = 10_000.0,
    ) -> None:
        if span.warmup:
            raise ArgumentError("warmup", "one_cycle has its own warm-up: set warmup to none")
        self._phases = _Phases(span, pct_start, anneal_strategy)
        self._start, self._end = 1 / div_factor, 1 / div_factor / final_div_factor

    def __call__(self, at: float) -> float:
        """The factor after `at` steps."""
        is_rising, left = self._phases(at)
        return 1 + (self._start - 1) * left if is_rising else self._end + (1 - self._end) * left


@register.schedule("inverse_one_cycle")
class InverseOneCycle:
    """From 1 to 0 while one_cycle rises, and back to 1 while it falls: for momentum."""

    def __init__(
        self, span: Span, pct_start: PartialShare = 0.3, anneal_strategy: Literal["cos", "linear"] = "cos"
    ) -> None:
        self._phases = _Phases(span, pct_start, anneal_strategy)

    def __call__(self, at: float) -> float:
        """The factor after `at` steps."""
        is_rising, left = self._phases(at)
        return left if is_rising else 1 - left


class _Phases:
    """Whether a cycle is in its rising phase, and a curve from 1 to 0 over the phase."""

    def __init__(self, span: Span, pct_start: float, anneal_strategy: str) -> None:
        # The last step of each phase is at its end, so phases are one step shorter than their number of steps.
        self._top, self._last = pct_start * span.length - span.tick, span.length - span.tick
        self._shape = half_cosine if anneal_strategy == "cos" else SHAPES[anneal_strategy]

    def __call__(self, at: float) -> tuple[bool, float]:
        if at <= self._top and self._top > 0:
            return True, self._shape(at / self._top)
        return False, self._shape(min((at - self._top) / (self._last - self._top), 1.0))
