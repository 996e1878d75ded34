"""Decays that rise as well as fall; the protocol is that of decays.py."""

from __future__ import annotations

import math
from typing import Literal

from paceline.optim.decays import SHAPES, cosine
from paceline.optim.span import ArgumentError, Span


class CosineRestarts:
    """Half a cosine several times over, each time from the top."""

    def __init__(self, span: Span, cycles: int = 2) -> None:
        self._cycles, self._length = cycles, span.length

    def __call__(self, at: float) -> float:
        """The share left after `at` updates."""
        cycle = at * self._cycles / self._length
        return cosine(cycle - min(math.floor(cycle), self._cycles - 1))


class F3:
    """On straight lines up to the middle of the run and down again: 1 − |2(e+1)/(T+1) − 1|."""

    whole_run = True
    is_bounded = True

    def __init__(self, span: Span) -> None:
        self._unit, self._whole = span.unit, span.length + span.unit

    def __call__(self, at: float) -> float:
        """The share left after `at` updates."""
        return 1 - abs(2 * (at + self._unit) / self._whole - 1)


class OneCycle:
    """Up from lr / start_divisor to the learning rate, then down to the start's value / end_divisor at the last update.

    The numbers are those of torch's OneCycleLR with two phases.
    """

    is_bounded = True

    def __init__(
        self,
        span: Span,
        up_share: float = 0.3,
        shape: Literal["cosine", "linear"] = "cosine",
        start_divisor: float = 25.0,
        end_divisor: float = 10_000.0,
    ) -> None:
        if span.warmup:
            raise ArgumentError("warmup", "one_cycle rises by itself: set warmup to none")
        self._legs = _Legs(span, up_share, shape)
        self._start, self._end = 1 / start_divisor, 1 / start_divisor / end_divisor

    def __call__(self, at: float) -> float:
        """The share left after `at` updates."""
        is_rising, left = self._legs(at)
        return 1 + (self._start - 1) * left if is_rising else self._end + (1 - self._end) * left


class InverseOneCycle:
    """From 1 down to 0 while one_cycle rises, and back to 1 while it falls: what momentum does beside it."""

    def __init__(self, span: Span, up_share: float = 0.3, shape: Literal["cosine", "linear"] = "cosine") -> None:
        self._legs = _Legs(span, up_share, shape)

    def __call__(self, at: float) -> float:
        """The share left after `at` updates."""
        is_rising, left = self._legs(at)
        return left if is_rising else 1 - left


class _Legs:
    """Whether a cycle still rises, and what is left of the way, 1 to 0, on its leg."""

    def __init__(self, span: Span, up_share: float, shape: str) -> None:
        if not 0 <= up_share < 1:
            raise ArgumentError("up_share", f"expected a share from 0 up to, but not including, 1, got {up_share:g}")
        # The last update of each leg stands at its end, so legs are one update shorter than their number of updates.
        self._top, self._last = up_share * span.length - span.tick, span.length - span.tick
        self._shape = SHAPES[shape]

    def __call__(self, at: float) -> tuple[bool, float]:
        if at <= self._top and self._top > 0:
            return True, self._shape(at / self._top)
        return False, self._shape(min((at - self._top) / (self._last - self._top), 1.0))
