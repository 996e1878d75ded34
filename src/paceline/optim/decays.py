"""How a learning rate decays: each decay gives the factor left at a point of the run."""

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
from paceline.optim.durations import Span, either, snapped

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
    """A straight line."""
    return 1 - done


@register.schedule("cosine")
@register.schedule("half_cosine")
def cosine(done: float) -> float:
    """Half a cosine: slow, fast, slow."""
    return 0.5 * (1 + math.cos(math.pi * done))


@register.schedule("poly")
def poly(done: float, power: Positive = 0.9) -> float:
    """A power of what is left."""
    return float((1 - done) ** power)


def one_minus_root(done: float) -> float:
    """Fast, then slow: 1 − √done."""
    return 1 - math.sqrt(done)


SHAPES: dict[str, Callable[[float], float]] = {"linear": linear, "cosine": cosine, "sqrt": one_minus_root}
"""Ways from 1 to 0, by name."""


@register.schedule("step", checks=[ExactlyOneOf("every_epochs", "every_steps")])
class Step:
    """×gamma every so many epochs or steps."""

    whole_run = True
    is_bounded = True

    def __init__(
        self, span: Span, gamma: Positive = 0.1, every_epochs: Positive | None = None, every_steps: Count | None = None
    ) -> None:
        self._every = span.duration("every", every_epochs, every_steps)
        span.check_reached("every_epochs" if every_steps is None else "every_steps", self._every)
        self._gamma, self._first = gamma, span.first

    def __call__(self, at: float) -> float:
        """The share left after `at` steps."""
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
        """The share left after `at` steps."""
        return self._gamma ** bisect_right(self._milestones, at + self._first)


@register.schedule("step_cosine", checks=[ExactlyOneOf("milestone_epochs", "milestone_steps")])
class StepCosine:
    """×gamma at each milestone but the last; from that one, half a cosine from the level reached down to 0."""

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
        """The share left after `at` steps."""
        if at + self._first < self._last:
            return self._gamma ** bisect_right(self._drops, at + self._first)
        # Counted from 1, the cosine begins one step before its top, as in Pet; it is as high on either side.
        return self._gamma ** len(self._drops) * cosine((at - self._last) / self._left)


@register.schedule("exponential", checks=[AtMostOneOf("every_epochs", "every_steps")])
class Exponential:
    """×gamma per epoch, or per so many epochs or steps, and evenly in between."""

    is_bounded = True

    def __init__(
        self, span: Span, gamma: Positive, every_epochs: Positive | None = None, every_steps: Count | None = None
    ) -> None:
        if every_epochs is None and every_steps is None:
            every_epochs = 1
        self._every = span.duration("every", every_epochs, every_steps)
        self._gamma = gamma

    def __call__(self, at: float) -> float:
        """The share left after `at` steps."""
        return float(self._gamma ** (at / self._every))


@register.schedule("wsd")
class WarmupStableDecay:
    """No decay until a cool-down to 0 at the end."""

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
            self._cooldown = snapped(span.total * (0.2 if cooldown_share is None else cooldown_share))
        elif cooldown_share is None:
            key = either("cooldown", cooldown_epochs, cooldown_steps)[0]
            self._cooldown = span.duration("cooldown", cooldown_epochs, cooldown_steps)
        else:
            raise ArgumentError("cooldown_share", "cannot be given together with cooldown_epochs or cooldown_steps")
        self._start = span.length - self._cooldown
        if self._start + span.begin < span.warmup:
            left = f"the {pluralize(span.total - span.warmup, 'step')} that warm-up leaves"
            raise ArgumentError(key, f"expected a cool-down of at most {left}, got {pluralize(self._cooldown, 'step')}")
        self._shape = SHAPES[shape]

    def __call__(self, at: float) -> float:
        """The share left after `at` steps."""
        return 1.0 if at <= self._start else self._shape((at - self._start) / self._cooldown)


@register.schedule("piecewise", checks=[ExactlyOneOf("point_epochs", "point_steps")])
class Piecewise:
    """Through given points: straight lines between them, or each one's factor until the next."""

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
        """The share left after `at` steps."""
        at += self._first
        after = bisect_right(self._points, at)
        if after == 0:
            return self._factors[0]
        before = after - 1
        if after == len(self._points) or not self._is_linear:
            return self._factors[before]
        share = (at - self._points[before]) / (self._points[after] - self._points[before])
        return self._factors[before] + (self._factors[after] - self._factors[before]) * share


@register.schedule("cosine_restarts")
class CosineRestarts:
    """Half a cosine several times over, each time from the top."""

    def __init__(self, span: Span, cycles: Count = 2) -> None:
        self._cycles, self._length = cycles, span.length

    def __call__(self, at: float) -> float:
        """The share left after `at` steps."""
        cycle = at * self._cycles / self._length
        return cosine(cycle - min(math.floor(cycle), self._cycles - 1))


@register.schedule("f3")
class F3:
    """On straight lines up to the middle of the run and down again: 1 − |2(e+1)/(T+1) − 1|."""

    whole_run = True
    is_bounded = True

    def __init__(self, span: Span) -> None:
        self._unit, self._whole = span.unit, span.length + span.unit

    def __call__(self, at: float) -> float:
        """The share left after `at` steps."""
        return 1 - abs(2 * (at + self._unit) / self._whole - 1)


@register.schedule("one_cycle")
class OneCycle:
    """Up from lr / start_divisor to the learning rate, then down to the start's value / end_divisor at the last step.

    The numbers are those of torch's OneCycleLR with two phases.
    """

    is_bounded = True

    def __init__(
        self,
        span: Span,
        up_share: PartialShare = 0.3,
        shape: Literal["cosine", "linear"] = "cosine",
        start_divisor: Annotated[float, Field(ge=1)] = 25.0,
        end_divisor: Positive = 10_000.0,
    ) -> None:
        if span.warmup:
            raise ArgumentError("warmup", "one_cycle rises by itself: set warmup to none")
        self._legs = _Legs(span, up_share, shape)
        self._start, self._end = 1 / start_divisor, 1 / start_divisor / end_divisor

    def __call__(self, at: float) -> float:
        """The share left after `at` steps."""
        is_rising, left = self._legs(at)
        return 1 + (self._start - 1) * left if is_rising else self._end + (1 - self._end) * left


@register.schedule("inverse_one_cycle")
class InverseOneCycle:
    """From 1 down to 0 while one_cycle rises, and back to 1 while it falls: what momentum does beside it."""

    def __init__(self, span: Span, up_share: PartialShare = 0.3, shape: Literal["cosine", "linear"] = "cosine") -> None:
        self._legs = _Legs(span, up_share, shape)

    def __call__(self, at: float) -> float:
        """The share left after `at` steps."""
        is_rising, left = self._legs(at)
        return left if is_rising else 1 - left


class _Legs:
    """Whether a cycle still rises, and what is left of the way, 1 to 0, on its leg."""

    def __init__(self, span: Span, up_share: float, shape: str) -> None:
        if not 0 <= up_share < 1:
            raise ArgumentError("up_share", f"expected a share from 0 up to, but not including, 1, got {up_share:g}")
        # The last step of each leg stands at its end, so legs are one step shorter than their number of steps.
        self._top, self._last = up_share * span.length - span.tick, span.length - span.tick
        self._shape = SHAPES[shape]

    def __call__(self, at: float) -> tuple[bool, float]:
        if at <= self._top and self._top > 0:
            return True, self._shape(at / self._top)
        return False, self._shape(min((at - self._top) / (self._last - self._top), 1.0))
