"""The precision a run computes in: its interface, and float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.engine.loss_accumulator import ScaledLoss


class Precision(Protocol):
    """What a run asks of its precision, in the order of a run."""

    @property
    def warning(self) -> str | None:
        """What a user should know before the run, if anything."""

    def attach(self, model: nn.Module) -> nn.Module:
        """Make the model's weights what they are to be: once, after the optimizer is made and before any wrapping.

        The result has the model's names and buffers and the weights that the optimizer holds: averages, optimizer
        states and checkpoints are kept by it. Where the model holds those weights itself, it is the model.
        """

    def compute(self) -> AbstractContextManager[None]:
        """Surrounds forward passes, of training and of evaluation."""

    def backward(self, losses: Sequence[ScaledLoss]) -> None:
        """Add the gradients of the losses, times the loss scale, to those of the step."""

    def carriers(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The model's counterparts of the optimizer's parameters, on which `backward` leaves gradients."""

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have the optimizer's parameters carry the gradient of the step, no longer scaled.

        It comes after the last micro-batch and the exchange among processes.
        """

    def overflowed(self, norm: Tensor) -> bool:
        """Whether the step has to be left out: once a step, by the norm of what `collect` left."""

    def sync_weights(self) -> None:
        """Have the model compute with the weights that the optimizer holds, after any change of these."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""

    def metrics(self) -> dict[str, float]:
        """What changes during a run and is worth recording, by name."""

    def describe(self) -> str:
        """One line for the start of a run."""


class FullPrecision:
    """Everything in float32; nothing is scaled."""

    @property
    def warning(self) -> str | None:
        """Nothing to warn of."""
        return None

    def attach(self, model: nn.Module) -> nn.Module:
        """The model as it is."""
        return model

    def compute(self) -> AbstractContextManager[None]:
        """Surrounds forward passes."""
        return nullcontext()

    def backward(self, losses: Sequence[ScaledLoss]) -> None:
        """Add the gradients of the losses to those of the step."""
        add_gradients(losses)

    def carriers(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The parameters themselves."""
        return parameters

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients are where they belong."""

    def overflowed(self, norm: Tensor) -> bool:
        """Never; the norm is not read."""
        return False

    def sync_weights(self) -> None:
        """The model holds the optimizer's weights."""

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


def add_gradients(losses: Sequence[ScaledLoss], scale: float = 1.0) -> None:
    """Add the gradients of the losses, times `scale`, to those of the leaves."""
    # The factors enter where the chain rule starts: a multiplication in the graph would cost several times more.
    roots = [loss for loss in losses if loss.value.requires_grad]
    # Beyond the range of a float16 value a factor becomes infinite, and the step an overflow.
    factors = [loss.value.new_full((), loss.factor * scale) for loss in roots]
    torch.autograd.backward([loss.value for loss in roots], factors)
