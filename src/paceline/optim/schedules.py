"""Schedules of learning rate, momentum and weight decay: pure functions of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.core.errors import ArgumentError
from paceline.optim.durations import Span, either, snapped

Per = Literal["step", "epoch", "fraction"]
SUPPLIED = ("done", "step", "epoch", "total_steps", "total_epochs")
"""What a decay that is a function can ask for; `span` is what one that is a class is given."""


class Schedule:
    """The learning rate of every step, before group factors: warm-up, then decay to a floor.

    `decay` is what a registered name stands for, `arguments` its own. `per` says how progress is read: each `step`;
    each whole `epoch`, its value held; or each `fraction` of an epoch, which is as fine as `step` and differs only
    where a formula adds 1 to what it counts (f3): that 1 is an epoch. `count_from` is the number of the first step
    (of the first epoch with `per` epoch) in warm-up and in comparing with points of the run: 1 reaches the learning
    rate at the last step of warm-up, 0 at the first after it. `decay_from` says where the decay begins to count,
    at the `start` of the run or after `warmup`; `auto` leaves it to the decay. `floor` is a share, `floor_lr` a
    learning rate.
    """

    def __init__(
        self,
        lr: float,
        decay: Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        *,
        total_steps: int,
        steps_per_epoch: int,
        per: Per = "step",
        count_from: Literal[0, 1] = 0,
        decay_from: Literal["auto", "start", "warmup"] = "auto",
        warmup: Literal["none", "constant", "linear"] = "linear",
        warmup_epochs: float | None = None,
        warmup_steps: float | None = None,
        warmup_from: float = 0.0,
        floor: float = 0.0,
        floor_lr: float | None = None,
    ) -> None:
        length = _warmup_length(warmup, warmup_epochs, warmup_steps, warmup_from, total_steps, steps_per_epoch)
        whole_run = getattr(decay, "whole_run", False) if decay_from == "auto" else decay_from == "start"
        span = Span(
            begin=0 if whole_run else length,
            warmup=length,
            total=math.ceil(total_steps / steps_per_epoch) * steps_per_epoch if per == "epoch" else total_steps,
            steps_per_epoch=steps_per_epoch,
            tick=steps_per_epoch if per == "epoch" else 1,
            unit=1 if per == "step" else steps_per_epoch,
            count_from=count_from,
        )
        self.lr, self.floor_lr, self.span = lr, _floor(lr, floor, floor_lr), span
        self._is_warmup_linear, self._warmup_from = warmup == "linear", warmup_from
        self._decay = _make(decay, arguments or {}, span)
        self._is_bounded = getattr(decay, "is_bounded", False)
        # Copies: reading them through the span would take longer than the formula.
        self._tick, self._first, self._total = span.tick, span.first, span.total
        self._warmup, self._begin = span.warmup, span.begin

    def __call__(self, step: int) -> float:
        """The learning rate of the step that follows `step` others."""
        at = min(step - step % self._tick, self._total)
        if at < self._warmup:
            return self.lr * self._warmth(at)
        factor: float = self._decay(at - self._begin)
        if self._is_bounded:
            return max(self.lr * factor, self.floor_lr)
        return self.floor_lr + (self.lr - self.floor_lr) * factor

    def _warmth(self, at: float) -> float:
        if not self._is_warmup_linear:
            return self._warmup_from
        share = min((at + self._first) / self._warmup, 1.0)
        return self._warmup_from * (1 - share) + share


class Transition:
    """A value that goes from `start` to `end` over the run as a decay goes from 1 to 0: momentum, weight decay."""

    def __init__(
        self,
        start: float,
        end: float,
        decay: Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        *,
        total_steps: int,
        steps_per_epoch: int,
        per: Per = "step",
    ) -> None:
        self.start, self.end = start, end
        self._left = Schedule(
            1.0, decay, arguments, total_steps=total_steps, steps_per_epoch=steps_per_epoch, per=per, warmup="none"
        )

    def __call__(self, step: int) -> float:
        """The value for the step that follows `step` others."""
        return self.end + (self.start - self.end) * self._left(step)


@dataclass(frozen=True)
class Schedules:
    """All that is planned over a run; what is None stays as the optimizer has it."""

    lr: Schedule
    momentum: Transition | None = None
    weight_decay: Transition | None = None


class ChangeLog:
    """Tells which learning rates are worth a line: those that differ from the last one told by more than a ratio."""

    def __init__(self, ratio: float = 1.1, least: float = 1e-7) -> None:
        if ratio < 1:
            raise ArgumentError("ratio", f"expected a number >= 1, got {ratio:g}")
        self.told: float | None = None
        """The last learning rate told, or else the first one seen."""
        self.jumped_from: float | None = None
        """The learning rate before this step, if it changed after steps without any change, as at a milestone."""
        self._recent = (math.nan, math.nan)
        self._least = least
        self._ratio = ratio * (1 + 1e-12)  # a change by exactly the ratio is none, whatever rounding does to it

    def __call__(self, lr: float) -> tuple[float, float] | None:
        """The last learning rate told and this one, if it is to be told; one below `least` never is."""
        (before_last, last), self._recent = self._recent, (self._recent[1], lr)
        self.jumped_from = last if before_last == last != lr else None
        before = lr if self.told is None else self.told
        if self.told is None:
            self.told = lr
        if lr < self._least or (before <= lr * self._ratio and lr <= before * self._ratio):
            return None
        self.told = lr
        return before, lr


class _Function:
    """A decay that is a function, given what it asks for."""

    def __init__(self, function: Callable[..., float], arguments: Mapping[str, Any], span: Span) -> None:
        self._asked = [name for name in SUPPLIED if name in inspect.signature(function).parameters]
        if not self._asked:
            name = getattr(function, "__name__", str(function))
            raise ArgumentError("decay", f"{name} asks for none of span, {', '.join(SUPPLIED)}")
        self._function, self._arguments, self._span, self._length = function, arguments, span, span.length

    def __call__(self, at: float) -> float:
        done = at / self._length
        if self._asked == ["done"]:
            return self._function(done, **self._arguments)
        span = self._span
        step = round(at + span.begin)
        known = (done, step, step / span.steps_per_epoch, span.total, span.total / span.steps_per_epoch)
        supplied = dict(zip(SUPPLIED, known, strict=True))
        return self._function(**{name: supplied[name] for name in self._asked}, **self._arguments)


def _make(decay: Callable[..., Any], arguments: Mapping[str, Any], span: Span) -> Callable[[float], float]:
    if "span" in inspect.signature(decay).parameters:
        made: Callable[[float], float] = decay(span, **arguments)
        return made
    return _Function(decay, arguments, span)


def _warmup_length(
    warmup: str,
    epochs: float | None,
    steps: float | None,
    share: float,
    total_steps: int,
    steps_per_epoch: int,
) -> float:
    """Warm-up in steps; 0 if none is asked for."""
    if not epochs and not steps:
        return 0.0
    key, value = either("warmup", epochs, steps)
    unit, size = ("epochs", steps_per_epoch) if key == "warmup_epochs" else ("steps", 1)
    if warmup == "none":
        raise ArgumentError(key, "given, but warmup is none; set it to linear or constant")
    if value < 0:
        raise ArgumentError(key, f"expected a number >= 0, got {value:g}")
    if value * size >= total_steps:
        raise ArgumentError(key, f"expected less than the run's {total_steps / size:g} {unit}, got {value:g}")
    if warmup == "constant" and not share:
        raise ArgumentError("warmup_from", "expected a share > 0, since warmup is constant, got 0")
    return snapped(value * size)


def _floor(lr: float, floor: float, floor_lr: float | None) -> float:
    if floor_lr is None:
        if not 0 <= floor <= 1:
            raise ArgumentError("floor", f"expected a share from 0 to 1, got {floor:g}")
        return lr * floor
    if floor:
        raise ArgumentError("floor_lr", "cannot be given together with floor; keep one of them")
    if not 0 <= floor_lr <= lr:
        raise ArgumentError("floor_lr", f"expected a learning rate from 0 to {lr:g}, got {floor_lr:g}")
    return floor_lr
