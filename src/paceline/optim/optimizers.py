"""torch's optimizers, fused where torch has that and where it is right; and trust ratios for any optimizer.

`lr` and `weight_decay` are keys of a recipe's `optimizer` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.arguments import NonNegative, PartialShare, Positive
from paceline.core.registry import register
from paceline.core.signatures import signature_of
from paceline.core.torch_private import foreach

OptimizerFactory = Callable[..., Optimizer]
Group = dict[str, Any]
"""Parameters under "params" with their own "lr" and "weight_decay"; further keys stay with the group."""

Groups = Sequence[Group]

EXCLUDED = {
    "LBFGS": "evaluates the loss several times within one step",
    "SparseAdam": "works on sparse gradients only",
    "Muon": "works on matrices only; `muon` is timm's, which uses AdamW for the rest",
}
"""Why some have no name here."""

Betas = Annotated[Sequence[PartialShare], Field(min_length=2, max_length=2)]
_Two = Field(min_length=2, max_length=2)

# Without a fused form torch chooses: foreach on a GPU, one by one on a CPU, where foreach is slower because each pass
# over all tensors misses the caches.
_FUSED = {
    "cpu": {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad},
    "cuda": {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW},
}
_FUSED_SHARDED = {torch.optim.Adam, torch.optim.AdamW}
# On a CPU, torch 2.13's fused SGD leaves half-precision weights unchanged and corrupts their momentum; Adagrad creates
# its state before weights become half, and then refuses it.
_FUSED_HALF = (torch.optim.Adam, torch.optim.AdamW)


def make_optimizer(
    optimizer: OptimizerFactory,
    groups: Sequence[Group],
    lr: float,
    weight_decay: float,
    arguments: dict[str, Any],
) -> Optimizer:
    """The optimizer over groups; `lr` and `weight_decay` are the defaults of those that do not set them."""
    if not any(group["params"] for group in groups):
        raise ValueError("there is nothing to train: all parameters are frozen")
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    options |= {"lr": lr, "weight_decay": weight_decay}
    if not accepts(optimizer, "weight_decay"):
        _check_no_decay(optimizer, groups, weight_decay)
        del options["weight_decay"]
    return construct(optimizer, [dict(group) for group in groups], **options)


def construct(optimizer: OptimizerFactory, groups: Sequence[Group], **options: Any) -> Optimizer:
    """The optimizer over these groups, fused where that is faster and right."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    devices = {parameter.device.type for parameter in parameters}
    device = devices.pop() if len(devices) == 1 else ""
    can_fuse = (
        optimizer in _FUSED.get(device, ())
        and (optimizer in _FUSED_SHARDED or not any(hasattr(parameter, "placements") for parameter in parameters))
        and all(parameter.is_floating_point() for parameter in parameters)
        and not options.get("dampening")  # see _init_momentum
    )
    if not can_fuse:
        return optimizer(groups, **options)
    fused = optimizer(groups, fused=True, **options)
    if isinstance(fused, torch.optim.SGD):
        fused.register_step_pre_hook(_init_momentum)
    unfuse_half(fused)
    return fused


def unfuse_half(optimizer: Optimizer) -> None:
    """Use the plain form for groups with half-precision weights on a CPU, where the fused one is wrong."""
    for group in optimizer.param_groups:
        is_half = any(each.device.type == "cpu" and each.dtype.itemsize == 2 for each in group["params"])
        if group.get("fused") and is_half and not isinstance(optimizer, _FUSED_HALF):
            group["fused"] = False


def _init_momentum(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give parameters with their first gradient a momentum of 0, which is how they start without dampening.

    torch's fused step fails if only some parameters of a group have one.
    """
    state = optimizer.state
    for group in optimizer.param_groups:
        if group["momentum"]:
            for parameter in group["params"]:
                if parameter.grad is not None and state[parameter].get("momentum_buffer") is None:
                    state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def accepts(optimizer: OptimizerFactory, name: str) -> bool:
    """Whether an optimizer takes an argument of this name."""
    parameters = signature_of(optimizer).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _check_no_decay(optimizer: OptimizerFactory, groups: Sequence[Group], weight_decay: float) -> None:
    found = [value for value in (weight_decay, *(group.get("weight_decay", 0) for group in groups)) if value]
    if found:
        name = getattr(optimizer, "__name__", str(optimizer))
        raise ValueError(f"{name} has no weight decay: expected weight_decay 0 everywhere, got {found[0]:g}")


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


def add_trust_ratio(
    optimizer: Optimizer, coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8, exclude_1d: bool = False
) -> None:
    """Scale every tensor's gradient by coefficient·‖w‖ / (‖g‖ + decay·‖w‖ + eps) before each step.

    With `clip` (LARC) the ratio is an upper bound of the learning rate: the gradient is scaled by min(ratio / lr, 1).
    Without (LARS), the learning rate is multiplied by it. Weight decay is added to the gradient before scaling, even
    with an optimizer that decouples it. With `exclude_1d`, tensors of one dimension are neither scaled nor decayed, as
    in MAE's LARS. There is no state, so checkpoints do not change.
    """
    min_ndim = 2 if exclude_1d else 0
    decays: list[float] = []

    @torch.no_grad()
    def scale(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        decays[:] = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            weights = [each for each in group["params"] if each.grad is not None and each.ndim >= min_ndim]
            if weights:
                _scale_by_trust(weights, coefficient, group["lr"] if clip else None, decay, eps)
            if "weight_decay" in group:
                group["weight_decay"] = 0.0  # it is part of the gradient now

    def restore_decay(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            if "weight_decay" in group:
                group["weight_decay"] = decay

    optimizer.register_step_pre_hook(scale)
    optimizer.register_step_post_hook(restore_decay)


def _scale_by_trust(weights: list[Tensor], coefficient: float, max_lr: float | None, decay: float, eps: float) -> None:
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    weight_norms = torch.stack(foreach("norm", weights))
    gradient_norms = torch.stack(foreach("norm", gradients))
    ratios = coefficient * weight_norms / (gradient_norms + decay * weight_norms + eps)
    if max_lr is not None:
        ratios = (ratios / max_lr).clamp_(max=1)
    # With zero weights the gradient is not scaled; with a zero gradient nothing moves.
    ratios = torch.where(weight_norms == 0, 1.0, torch.where(gradient_norms == 0, 0.0, ratios))
    if decay:
        foreach("add_", gradients, weights, alpha=decay)
    foreach("mul_", gradients, list(ratios.unbind()))
