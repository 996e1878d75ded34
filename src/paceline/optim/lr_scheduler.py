"""Learning rate, momentum and weight decay as pure functions of the step, and the scheduler that sets them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import ArgumentError
from paceline.core.signatures import signature_of
from paceline.optim.decays import Decay, Span, either, snap

if TYPE_CHECKING:  # a recipe's schedule is checked and drawn without torch
    from torch.optim import Optimizer

Per = Literal["step", "epoch", "fraction"]
SUPPLIED = ("done", "step", "epoch", "total_steps", "total_epochs")
"""The arguments that a decay function may take; a decay class takes `span`."""


class Schedule:
    """The learning rate of every step, before group factors: warm-up, then decay to a floor.

    `decay` is a registered class or function, `arguments` its own. `per` is how often the value changes: each `step`;
    each `epoch`; or each `fraction` of an epoch, which is as fine as `step` and differs only where a formula adds 1 to
    its count (f3): that 1 is an epoch. `count_from` is the number of the first step (with `per: epoch`, epoch) in
    warm-up and in comparisons with milestones: with 1 the last step of warm-up has the full learning rate, with 0 the
    first one after it. `decay_from` is where the decay starts to count, at the `start` of the run or after `warmup`;
    `auto` leaves it to the decay. `floor` is a fraction of the learning rate, `floor_lr` a learning rate.
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
        length = _warmup_length(warmup_epochs, warmup_steps, total_steps, steps_per_epoch)
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

    def __call__(self, step: int) -> float:
        """The learning rate of the step with this index, counted from 0."""
        span = self.span
        at = min(step - step % span.tick, span.total)
        if at < span.warmup:
            return self.lr * self._warmup_factor(at)
        factor: float = self._decay(at - span.begin)
        if self._is_bounded:
            return max(self.lr * factor, self.floor_lr)
        return self.floor_lr + (self.lr - self.floor_lr) * factor

    def _warmup_factor(self, at: float) -> float:
        if not self._is_warmup_linear:
            return self._warmup_from
        progress = min((at + self.span.first) / self.span.warmup, 1.0)
        return self._warmup_from * (1 - progress) + progress


class Transition:
    """A value that goes from `start` to `end` as a decay goes from 1 to 0, for momentum and weight decay."""

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
        self._factor = Schedule(
            1.0, decay, arguments, total_steps=total_steps, steps_per_epoch=steps_per_epoch, per=per, warmup="none"
        )

    def __call__(self, step: int) -> float:
        """The value of the step with this index, counted from 0."""
        return self.end + (self.start - self.end) * self._factor(step)


Setter = Callable[[dict[str, Any], int], None]


class Scheduler:
    """Sets the optimizer to the scheduled values of a step; a group's learning rate is multiplied by its `lr_scale`."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr: Schedule,
        momentum: Transition | None = None,
        weight_decay: Transition | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.lr = lr
        self._setters: list[Setter] = []
        if momentum is not None:
            self._setters.append(_momentum_setter(optimizer, momentum))
        if weight_decay is not None:
            self._setters.append(_decay_setter(optimizer, weight_decay))

    def apply(self, step: int) -> float:
        """Set the optimizer for a step; returns the learning rate before the groups' factors."""
        lr = self.lr(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
            for setter in self._setters:
                setter(group, step)
        return lr


def _momentum_setter(optimizer: Optimizer, momentum: Transition) -> Setter:
    if "betas" in optimizer.defaults:
        return lambda group, step: group.update(betas=(momentum(step), *group["betas"][1:]))
    if "momentum" in optimizer.defaults:
        return lambda group, step: group.update(momentum=momentum(step))
    raise ValueError(f"{type(optimizer).__name__} has no momentum; remove schedule.momentum")


def _decay_setter(optimizer: Optimizer, decay: Transition) -> Setter:
    """Groups without decay stay without."""
    if not any(group.get("weight_decay") for group in optimizer.param_groups):
        raise ValueError("no group has weight decay; set optimizer.weight_decay or remove schedule.weight_decay")
    decayed = {id(group["params"][0]) for group in optimizer.param_groups if group["weight_decay"]}

    def set_decay(group: dict[str, Any], step: int) -> None:
        if id(group["params"][0]) in decayed:
            group["weight_decay"] = decay(step)

    return set_decay


class LRChangeLog:
    """Filters learning rates for the log: those that differ from the last one logged by more than a ratio."""

    def __init__(self, ratio: float = 1.1, min_lr: float = 1e-7) -> None:
        self.logged: float | None = None
        """The last learning rate logged, or the first one seen."""
        self.jumped_from: float | None = None
        """The learning rate before this step, if it changes now after steps without a change, as at a milestone."""
        self._recent = (math.nan, math.nan)
        self._min_lr = min_lr
        self._ratio = ratio * (1 + 1e-12)  # a change by exactly the ratio is none, whatever its rounding

    def __call__(self, lr: float) -> tuple[float, float] | None:
        """The last learning rate logged and this one, if it is to be logged; one below `min_lr` never is."""
        (before_last, last), self._recent = self._recent, (self._recent[1], lr)
        self.jumped_from = last if before_last == last != lr else None
        before = lr if self.logged is None else self.logged
        if self.logged is None:
            self.logged = lr
        if lr < self._min_lr or (before <= lr * self._ratio and lr <= before * self._ratio):
            return None
        self.logged = lr
        return before, lr


def _make(decay: Callable[..., Any], arguments: Mapping[str, Any], span: Span) -> Decay:
    """The factor by position: what `decay` gives for the span, or `decay` itself with what it takes of a position."""
    taken = signature_of(decay).parameters
    if "span" in taken:
        made: Decay = decay(span, **arguments)
        return made
    if not any(name in taken for name in SUPPLIED):
        name = getattr(decay, "__name__", str(decay))
        raise ArgumentError("decay", f"{name} takes none of span, {', '.join(SUPPLIED)}")

    def factor(at: float) -> float:
        step = round(at + span.begin)
        known = (at / span.length, step, step / span.steps_per_epoch, span.total, span.total / span.steps_per_epoch)
        supplied = {name: value for name, value in zip(SUPPLIED, known, strict=True) if name in taken}
        return float(decay(**supplied, **arguments))

    return factor


def _warmup_length(epochs: float | None, steps: float | None, total_steps: int, steps_per_epoch: int) -> float:
    """Warm-up in steps; 0 for none."""
    if not epochs and not steps:
        return 0.0
    key, value = either("warmup", epochs, steps)
    unit, size = ("epochs", steps_per_epoch) if key == "warmup_epochs" else ("steps", 1)
    if value * size >= total_steps:
        raise ArgumentError(key, f"expected less than the run's {total_steps / size:g} {unit}, got {value:g}")
    return snap(value * size)


def _floor(lr: float, floor: float, floor_lr: float | None) -> float:
    if floor_lr is None:
        return lr * floor
    if floor_lr > lr:
        raise ArgumentError("floor_lr", f"expected a learning rate from 0 to {lr:g}, got {floor_lr:g}")
    return floor_lr
