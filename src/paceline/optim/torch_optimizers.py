"""torch's optimizers. `lr` and `weight_decay` are keys of `optimizer` itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch.optim import Optimizer

from paceline.core.arguments import NonNegative, PartialShare, Positive
from paceline.core.registry import register
from paceline.optim.optimizers import Group, construct

EXCLUDED = {
    "LBFGS": "evaluates the loss several times within one step",
    "SparseAdam": "works on sparse gradients only",
    "Muon": "works on matrices only; `muon` is timm's, which uses AdamW for the rest",
}
"""Why some have no name here."""

Betas = Annotated[Sequence[PartialShare], Field(min_length=2, max_length=2)]
_Two = Field(min_length=2, max_length=2)
Groups = Sequence[Group]


@register.optimizer("sgd")
def sgd(
    params: Groups,
    momentum: PartialShare = 0.9,
    dampening: PartialShare = 0.0,
    nesterov: bool = False,
    **common: Any,
) -> Optimizer:
    """Stochastic gradient descent with momentum."""
    own = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    return construct(torch.optim.SGD, params, **own, **common)


@register.optimizer("adam")
def adam(
    params: Groups, betas: Betas = (0.9, 0.999), eps: Positive = 1e-8, amsgrad: bool = False, **common: Any
) -> Optimizer:
    """Adam; weight decay is added to the gradient."""
    return construct(torch.optim.Adam, params, betas=betas, eps=eps, amsgrad=amsgrad, **common)


@register.optimizer("adamw")
def adamw(
    params: Groups, betas: Betas = (0.9, 0.999), eps: Positive = 1e-8, amsgrad: bool = False, **common: Any
) -> Optimizer:
    """Adam with decoupled weight decay."""
    return construct(torch.optim.AdamW, params, betas=betas, eps=eps, amsgrad=amsgrad, **common)


@register.optimizer("adamax")
def adamax(params: Groups, betas: Betas = (0.9, 0.999), eps: Positive = 1e-8, **common: Any) -> Optimizer:
    """Adamax: Adam with the infinity norm."""
    return construct(torch.optim.Adamax, params, betas=betas, eps=eps, **common)


@register.optimizer("nadam")
def nadam(
    params: Groups,
    betas: Betas = (0.9, 0.999),
    eps: Positive = 1e-8,
    momentum_decay: NonNegative = 0.004,
    decoupled_weight_decay: bool = False,
    **common: Any,
) -> Optimizer:
    """NAdam: Adam with Nesterov momentum."""
    own = {"momentum_decay": momentum_decay, "decoupled_weight_decay": decoupled_weight_decay}
    return construct(torch.optim.NAdam, params, betas=betas, eps=eps, **own, **common)


@register.optimizer("radam")
def radam(
    params: Groups,
    betas: Betas = (0.9, 0.999),
    eps: Positive = 1e-8,
    decoupled_weight_decay: bool = False,
    **common: Any,
) -> Optimizer:
    """RAdam: Adam with a rectified variance, which acts as a warm-up."""
    own = {"decoupled_weight_decay": decoupled_weight_decay}
    return construct(torch.optim.RAdam, params, betas=betas, eps=eps, **own, **common)


@register.optimizer("rmsprop")
def rmsprop(
    params: Groups,
    alpha: PartialShare = 0.99,
    eps: Positive = 1e-8,
    momentum: PartialShare = 0.0,
    centered: bool = False,
    **common: Any,
) -> Optimizer:
    """RMSprop, optionally with momentum."""
    own = {"alpha": alpha, "momentum": momentum, "centered": centered}
    return construct(torch.optim.RMSprop, params, eps=eps, **own, **common)


@register.optimizer("adadelta")
def adadelta(params: Groups, rho: PartialShare = 0.9, eps: Positive = 1e-6, **common: Any) -> Optimizer:
    """Adadelta; its own lr is 1."""
    return construct(torch.optim.Adadelta, params, rho=rho, eps=eps, **common)


@register.optimizer("adagrad")
def adagrad(
    params: Groups,
    lr_decay: NonNegative = 0.0,
    initial_accumulator_value: NonNegative = 0.0,
    eps: Positive = 1e-10,
    **common: Any,
) -> Optimizer:
    """Adagrad: steps shrink as squared gradients add up."""
    own = {"lr_decay": lr_decay, "initial_accumulator_value": initial_accumulator_value}
    return construct(torch.optim.Adagrad, params, eps=eps, **own, **common)


@register.optimizer("adafactor")
def adafactor(
    params: Groups,
    beta2_decay: float = -0.8,
    eps: Annotated[Sequence[float | None], _Two] = (None, 0.001),
    d: float = 1.0,
    **common: Any,
) -> Optimizer:
    """Adafactor: Adam with factored second moments, which need little memory."""
    return construct(torch.optim.Adafactor, params, beta2_decay=beta2_decay, eps=eps, d=d, **common)


@register.optimizer("asgd")
def asgd(params: Groups, lambd: float = 1e-4, alpha: float = 0.75, t0: float = 1_000_000.0, **common: Any) -> Optimizer:
    """Averaged SGD."""
    return construct(torch.optim.ASGD, params, lambd=lambd, alpha=alpha, t0=t0, **common)


@register.optimizer("rprop")
def rprop(
    params: Groups,
    lr: float,
    etas: Annotated[Sequence[float], _Two] = (0.5, 1.2),
    step_sizes: Annotated[Sequence[float], _Two] = (1e-6, 50.0),
) -> Optimizer:
    """Rprop: steps by the gradient's sign, for full-batch training; no weight decay."""
    return construct(torch.optim.Rprop, params, lr=lr, etas=etas, step_sizes=step_sizes)
