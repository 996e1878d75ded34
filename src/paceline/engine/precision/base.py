"""The precision a run computes in: its interface, and float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import TrainingError
from paceline.engine.loss_accumulator import WeightedLoss
from paceline.optim.clipping import Norm


class Precision(Protocol):
    """The interface of a precision, in the order in which a run calls it."""

    @property
    def warning(self) -> str | None:
        """A warning for the user before the run, if there is one."""

    def attach(self, model: nn.Module) -> nn.Module:
        """Convert the model's weights: once, after the optimizer is built and before the model is wrapped.

        The result has the model's names and buffers and the weights that the optimizer holds: averages, optimizer
        states and checkpoints are kept by it. Where the model holds those weights itself, it is the model.
        """

    def compute(self) -> AbstractContextManager[None]:
        """A context for forward passes, in training and evaluation."""

    def backward(self, losses: Sequence[WeightedLoss]) -> None:
        """Add the gradients of the losses, times the loss scale, to those of the step."""

    def carriers(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The model's counterparts of the optimizer's parameters, on which `backward` leaves gradients."""

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give the optimizer's parameters the unscaled gradient of the step.

        It comes after the last micro-batch and the exchange among processes.
        """

    def update_loss_scale(self, norm: Norm) -> Tensor | None:
        """Update the loss scale; whether it was too high, so that the step must be skipped. None without a loss scale.

        Called once a step, with the norm of the unscaled gradient, which stays on the device.
        """

    def sync_weights(self) -> None:
        """Copy the optimizer's weights into the model, after any change of them."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""

    def metrics(self) -> dict[str, float]:
        """Values that change during a run and are logged, by name."""

    def describe(self) -> str:
        """One line for the start of a run."""


_GRAPH_ERRORS = {
    "modified by an inplace operation": "use no operation in place, such as exp_ or +=, on what a gradient needs",
    "through the graph a second time": "call no backward(), and detach() what you keep from one step to the next",
}
"""What torch says about mistakes that only a backward pass meets, and their cures."""


class FullPrecision:
    """Everything in float32; nothing is scaled."""

    @property
    def warning(self) -> str | None:
        """No warning."""
        return None

    def attach(self, model: nn.Module) -> nn.Module:
        """The model as it is."""
        return model

    def compute(self) -> AbstractContextManager[None]:
        """A context for forward passes."""
        return nullcontext()

    def backward(self, losses: Sequence[WeightedLoss]) -> None:
        """Add the gradients of the losses to those of the step."""
        add_gradients(losses)

    def carriers(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The parameters themselves."""
        return parameters

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing."""

    def update_loss_scale(self, norm: Norm) -> Tensor | None:
        """There is no loss scale."""
        return None

    def sync_weights(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""

    def metrics(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def describe(self) -> str:
        """The format."""
        return "fp32"


def add_gradients(losses: Sequence[WeightedLoss], scale: float | Tensor = 1.0) -> None:
    """Add the gradients of the losses, times `scale`, to those of the leaves."""
    # The factors enter where the chain rule starts: a multiplication in the graph would cost several times more.
    roots = [loss for loss in losses if loss.value.requires_grad]
    # Beyond the range of a float16 value a factor becomes infinite, and the step an overflow.
    factors = [_like(loss.value, loss.weight * scale) for loss in roots]
    try:
        torch.autograd.backward([loss.value for loss in roots], factors)
    except RuntimeError as error:
        cure = next((cure for words, cure in _GRAPH_ERRORS.items() if words in str(error)), None)
        if cure is None:
            raise
        found = str(error).partition(" Hint:")[0].partition(". Saved")[0].rstrip(".")
        raise TrainingError(f"the backward pass failed: {found}; in your model or loss, {cure}") from error


def _like(value: Tensor, factor: float | Tensor) -> Tensor:
    # The scale of the first step is still on the host, and must not wait for the device.
    return factor.to(value, non_blocking=True) if isinstance(factor, Tensor) else value.new_full((), factor)
