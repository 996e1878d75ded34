"""How a learning rate falls: each decay gives the share of it that is left.

A decay is registered under the name that recipes call it by; its own arguments stand beside that name. There are
two forms, told apart by whether `span` is among the parameters.

A function is asked at every update. It names what it wants to know; whatever else it takes are its arguments:

    @register.schedule("squared")
    def squared(done: float, power: float = 2.0) -> float:
        return (1 - done) ** power

It can ask for `done` (the share of the decay that is over, 0 to 1), `step` (the updates before this one), `epoch`
(the same in epochs), `total_steps` and `total_epochs`. With `per: epoch`, an epoch's first update speaks for all.

A class is made once for a run, refuses wrong arguments there (`ArgumentError`, which names them), and is then called
with the number of updates since the decay began to count:

    @register.schedule("halving")
    class Halving:
        whole_run = True     # it counts from the start of the run; if left out, from the end of warm-up
        is_bounded = True    # the floor only bounds it; if left out, what goes from 1 to 0 ends at the floor instead

        def __init__(self, span: Span, every_steps: int = 1000) -> None:
            self.every = span.duration("every", None, every_steps)

        def __call__(self, at: float) -> float:
            return 0.5 ** (at // self.every)

Nothing is remembered from call to call: the same step gives the same share, so resuming needs only the step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Literal

from paceline.core.counting import counted
from paceline.optim.span import ArgumentError, Span, either, snapped

_ROUNDING = 1e-9


def constant(done: float) -> float:
    """No decay."""
    return 1.0


def linear(done: float) -> float:
    """A straight line."""
    return 1 - done


def cosine(done: float) -> float:
    """Half a cosine: slow, fast, slow."""
    return 0.5 * (1 + math.cos(math.pi * done))


def poly(done: float, power: float = 0.9) -> float:
    """A power of what is left."""
    return float((1 - done) ** power)


def one_minus_root(done: float) -> float:
    """Fast, then slow: 1 − √done."""
    return 1 - math.sqrt(done)


SHAPES: dict[str, Callable[[float], float]] = {"linear": linear, "cosine": cosine, "sqrt": one_minus_root}
"""Ways from 1 to 0, by name."""


class Step:
    """×gamma every so many epochs or updates."""

    whole_run = True
    is_bounded = True

    def __init__(
        self, span: Span, gamma: float = 0.1, every_epochs: float | None = None, every_steps: float | None = None
    ) -> None:
        self._every = span.duration("every", every_epochs, every_steps)
        span.check_reached("every_epochs" if every_steps is None else "every_steps", self._every)
        self._gamma, self._first = gamma, span.first

    def __call__(self, at: float) -> float:
        """The share left after `at` updates."""
        return self._gamma ** math.floor((at + self._first) / self._every + _ROUNDING)


class MultiStep:
    """×gamma at each milestone."""

    whole_run = True
    is_bounded = True

    def __init__(
        self,
        span: Span,
        gamma: float = 0.1,
        milestone_epochs: Sequence[float] | None = None,
        milestone_steps: Sequence[float] | None = None,
    ) -> None:
        self._milestones = span.points("milestone", milestone_epochs, milestone_steps)
        self._gamma, self._first = gamma, span.first

    def __call__(self, at: float) -> float:
        """The share left after `at` updates."""
        return self._gamma ** bisect_right(self._milestones, at + self._first)


class StepCosine:
    """×gamma at each milestone but the last; from that one, half a cosine from the level reached down to 0."""

    whole_run = True
    is_bounded = True

    def __init__(
        self,
        span: Span,
        gamma: float = 0.1,
        milestone_epochs: Sequence[float] | None = None,
        milestone_steps: Sequence[float] | None = None,
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
        """The share left after `at` updates."""
        if at + self._first < self._last:
            return self._gamma ** bisect_right(self._drops, at + self._first)
        # Counted from 1, the cosine begins one update before its top, as in Pet; it is as high on either side.
        return self._gamma ** len(self._drops) * cosine((at - self._last) / self._left)


class Exponential:
    """×gamma per epoch, or per so many epochs or updates, and evenly in between."""

    is_bounded = True

    def __init__(
        self, span: Span, gamma: float, every_epochs: float | None = None, every_steps: float | None = None
    ) -> None:
        if every_epochs is None and every_steps is None:
            every_epochs = 1
        self._every = span.duration("every", every_epochs, every_steps)
        self._gamma = gamma

    def __call__(self, at: float) -> float:
        """The share left after `at` updates."""
        return float(self._gamma ** (at / self._every))


class WarmupStableDecay:
    """No decay until a cool-down to 0 at the end."""

    whole_run = True

    def __init__(
        self,
        span: Span,
        cooldown_share: float | None = None,
        cooldown_epochs: float | None = None,
        cooldown_steps: float | None = None,
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
            left = f"the {counted(span.total - span.warmup, 'step')} that warm-up leaves"
            raise ArgumentError(key, f"expected a cool-down of at most {left}, got {counted(self._cooldown, 'step')}")
        self._shape = SHAPES[shape]

    def __call__(self, at: float) -> float:
        """The share left after `at` updates."""
        return 1.0 if at <= self._start else self._shape((at - self._start) / self._cooldown)


class Piecewise:
    """Through given points: straight lines between them, or each one's factor until the next."""

    whole_run = True
    is_bounded = True

    def __init__(
        self,
        span: Span,
        point_epochs: Sequence[Sequence[float]] | None = None,
        point_steps: Sequence[Sequence[float]] | None = None,
        between: Literal["linear", "constant"] = "linear",
    ) -> None:
        places = [None if points is None else [point[0] for point in points] for points in (point_epochs, point_steps)]
        self._points = span.points("point", *places)
        self._factors = [point[1] for point in either("point", point_epochs, point_steps)[1]]
        self._is_linear, self._first = between == "linear", span.first

    def __call__(self, at: float) -> float:
        """The share left after `at` updates."""
        at += self._first
        after = bisect_right(self._points, at)
        if after == 0:
            return self._factors[0]
        before = after - 1
        if after == len(self._points) or not self._is_linear:
            return self._factors[before]
        share = (at - self._points[before]) / (self._points[after] - self._points[before])
        return self._factors[before] + (self._factors[after] - self._factors[before]) * share
