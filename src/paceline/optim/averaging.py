"""Weight averages (EMA, SWA), evaluated beside the weights.

They keep parameters alone, in float32; torch's AveragedModel copies the whole module, in the weights' precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count, CountOrZero, PartialShare
from paceline.core.errors import CheckpointError
from paceline.core.registry import register
from paceline.core.text import join_first, pluralize
from paceline.core.torch_private import foreach
from paceline.models.norm import BATCH_NORMS
from paceline.models.placement import with_strides_of

T = TypeVar("T")


@register.averaging("none")
class Averaging:
    """No average."""

    # Averages of weights override what follows.

    needs_statistics = False
    """Whether `update_bn` should run before the averaged weights are used."""

    @property
    def is_ready(self) -> bool:
        """Whether there is an average yet."""
        return False

    def update(self, model: nn.Module) -> None:
        """Add the weights after a step, if one is due."""

    @contextmanager
    def swap_in(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights inside; its own weights and buffers are restored afterwards."""
        yield

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from; tensors are not copied."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; whether it matches the model is checked when it is used next."""


class WeightAverage(Averaging):
    """A running average of all parameters, frozen ones included, since they may be unfrozen later.

    It starts as a copy of the weights; that of half-precision weights is float32. Buffers are not averaged: averaged
    weights are evaluated with the model's current buffers.
    """

    def __init__(
        self, weight: Callable[[int], float], start_step: int, every_steps: int, needs_statistics: bool = False
    ) -> None:
        self.weight = weight
        """The weight of the next values in the average, after so many others."""
        self.start_step = start_step
        self.every_steps = every_steps
        self.needs_statistics = needs_statistics
        self.steps = 0
        """Optimizer steps so far."""
        self.count = 0
        """How many times weights were added."""
        self._average: dict[str, Tensor] = {}
        self._bound: nn.Module | None = None

    @property
    def is_ready(self) -> bool:
        return self.count > 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.steps += 1
        since_start = self.steps - self.start_step
        if since_start <= 0 or since_start % self.every_steps:
            return
        if not self.count:
            self._average = {name: _copy(parameter) for name, parameter in _weights(model).items()}
        self._bind(model)
        if self.count:
            weights = [weight.to(mean.dtype) for weight, mean in zip(self._parameters, self._means, strict=True)]
            foreach("lerp_", self._means, weights, self.weight(self.count))
        self.count += 1

    @contextmanager
    def swap_in(self, model: nn.Module) -> Iterator[None]:
        if not self.is_ready:
            yield
            return
        self._bind(model)
        replaced: list[Tensor] = [*self._parameters, *model.buffers()]
        own = [tensor.detach().clone() for tensor in replaced]
        try:
            with torch.no_grad():
                # One by one: torch has no foreach copy of sharded tensors.
                for parameter, mean in zip(self._parameters, self._means, strict=True):
                    parameter.copy_(mean)
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(replaced, own, strict=True):
                    tensor.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "count": self.count, "average": dict(self._average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.count = state["steps"], state["count"]
        self._average = {name: tensor.clone() for name, tensor in state["average"].items()}
        self._bound = None

    def _bind(self, model: nn.Module) -> None:
        """Look up the model's parameters once: that takes longer than averaging them."""
        if self._bound is model:
            return
        named = _weights(model)
        here = {name: tuple(parameter.shape) for name, parameter in named.items()}
        saved = {name: tuple(tensor.shape) for name, tensor in self._average.items()}
        if here != saved:
            different = sorted(name for name in here | saved if here.get(name) != saved.get(name))
            raise CheckpointError(f"the saved weight average does not match the model: {join_first(different, 5)}")
        self._average = {
            name: with_strides_of(self._average[name].to(parameter.device), parameter)
            for name, parameter in named.items()
        }
        self._parameters = list(named.values())
        self._means = list(self._average.values())
        self._bound = model


@register.averaging("ema")
def ema(
    decay: PartialShare = 0.9999,
    warmup: Annotated[bool, Field(description="Starts with a lower decay.")] = True,
    every_steps: Count = 1,
    start_step: CountOrZero = 0,
) -> WeightAverage:
    """Exponential moving average of the weights.

    With `warmup`, the decay starts lower: (1 + n) / (10 + n) after n updates, until it reaches `decay`.
    """
    return WeightAverage(
        lambda count: 1 - (min(decay, (1 + count) / (10 + count)) if warmup else decay), start_step, every_steps
    )


@register.averaging("swa")
def swa(
    total_steps: int,
    steps_per_epoch: int,
    start: Annotated[PartialShare | Count, Field(description="A fraction of the run, or a step.")] = 0.75,
    every_steps: Annotated[Count | None, Field(description="null: once per epoch.")] = None,
) -> WeightAverage:
    """Stochastic weight averaging: the mean of the weights from `start` on, a fraction of the run or a step.

    Weights are added every `every_steps`, by default once per epoch. BatchNorm statistics are measured for the average
    before it is evaluated.
    """
    start_step = round(start * total_steps) if start < 1 else int(start)
    every_steps = every_steps or steps_per_epoch
    if start_step + every_steps > total_steps:
        raise ValueError(
            f"averaging would never start: from step {start_step}, every {pluralize(every_steps, 'step')},"
            f" in a run of {total_steps}; lower start or every_steps"
        )
    return WeightAverage(lambda count: 1 / (count + 1), start_step, every_steps, needs_statistics=True)


@torch.no_grad()
def update_bn(model: nn.Module, inputs: Iterable[T], forward: Callable[[T], object] | None = None) -> None:
    """Recompute BatchNorm statistics for the current weights, as the mean over all inputs.

    `forward` runs an input through the model, by default `model(input)`. Unlike torch's `update_bn`, other layers are
    in evaluation mode, so the result depends on the inputs alone, and frozen layers keep their statistics.
    """
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS) and _tracks_statistics(module)]
    if not norms:
        return
    modes = {module: module.training for module in model.modules()}
    momenta = [norm.momentum for norm in norms]
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.train()
            norm.momentum = None  # the mean over all inputs
        for each in inputs:
            (forward or model)(each)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}


def _copy(weight: Tensor) -> Tensor:
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    return weight.detach().to(torch.float32 if is_half else weight.dtype, copy=True)


def _tracks_statistics(norm: Any) -> bool:
    parameters = list(norm.parameters(recurse=False))
    return norm.track_running_stats and (not parameters or any(each.requires_grad for each in parameters))
