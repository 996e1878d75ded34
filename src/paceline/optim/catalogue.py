"""The optimizers that recipes can name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.core.arguments import Arguments, PartialShare, Positive
from paceline.core.registry import register

optimizers = register.kind("optimizer")


class SgdArguments(Arguments):
    """Arguments of `sgd`."""

    momentum: PartialShare = 0.9
    nesterov: bool = False


class AdamArguments(Arguments):
    """Arguments of `adam` and `adamw`."""

    betas: Annotated[list[PartialShare], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: Positive = 1e-8


optimizers.add("sgd", "torch.optim:SGD", SgdArguments, "stochastic gradient descent with momentum")
optimizers.add("adam", "torch.optim:Adam", AdamArguments, "Adam; weight decay is part of the gradient")
optimizers.add("adamw", "torch.optim:AdamW", AdamArguments, "Adam with decoupled weight decay")
