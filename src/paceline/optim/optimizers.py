"""Optimizers in the fastest form that runs on the device: fused where torch has that, and where it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.errors import TrainingError
from paceline.core.signatures import signature_of
from paceline.models.memory_format import has_strides_of

OptimizerFactory = Callable[..., Optimizer]
Group = dict[str, Any]
"""Parameters under "params" with their own "lr" and "weight_decay"; further keys stay with the group."""

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
    parameters: Iterable[nn.Parameter] | Iterable[Group],
    lr: float,
    weight_decay: float,
    arguments: dict[str, Any],
) -> Optimizer:
    """The optimizer over groups, or over the trainable ones of plain parameters.

    `lr` and `weight_decay` are the defaults of groups that do not set them.
    """
    groups = _as_groups(parameters)
    if not any(group["params"] for group in groups):
        raise ValueError("there is nothing to train: all parameters are frozen")
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    options |= {"lr": lr, "weight_decay": weight_decay}
    if not _accepts(optimizer, "weight_decay"):
        _check_no_decay(optimizer, groups, weight_decay)
        del options["weight_decay"]
    return construct(optimizer, groups, **options)


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
    fused.register_step_pre_hook(_StrideCheck())
    unfuse_half(fused)
    return fused


def unfuse_half(optimizer: Optimizer) -> None:
    """Use the plain form for groups with half-precision weights on a CPU, where the fused one is wrong."""
    for group in optimizer.param_groups:
        is_half = any(each.device.type == "cpu" and each.dtype.itemsize == 2 for each in group["params"])
        if group.get("fused") and is_half and not isinstance(optimizer, _FUSED_HALF):
            group["fused"] = False


class _StrideCheck:
    """Raises before a fused step that would update the wrong weights: fused kernels pair elements by address.

    Gradients are checked at every step, the optimizer's state when it is new; a step changes it in place.
    """

    def __init__(self) -> None:
        self._state: dict[Any, Any] = {}
        self._size = 0

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        state = optimizer.state
        is_new = self._state is not state or self._size != len(state)
        for parameter in (each for group in optimizer.param_groups if group["fused"] for each in group["params"]):
            gradient = parameter.grad
            if gradient is not None and not has_strides_of(gradient, parameter):
                raise _stride_error(optimizer, parameter, "gradient", gradient)
            if not is_new:
                continue
            for key, value in state.get(parameter, {}).items():
                has_shape = isinstance(value, Tensor) and value.shape == parameter.shape
                if has_shape and not has_strides_of(value, parameter):
                    raise _stride_error(optimizer, parameter, key, value)
        self._state, self._size = state, len(state)


def _stride_error(optimizer: Optimizer, parameter: nn.Parameter, what: str, tensor: Tensor) -> TrainingError:
    names = {
        id(each): name
        for group in optimizer.param_groups
        for each, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    return TrainingError(
        f"parameter {names.get(id(parameter), '')} {list(parameter.shape)} has strides {parameter.stride()}, its {what}"
        f" has {tensor.stride()}: expected equal strides, since a fused optimizer pairs elements by address."
        f" Copy the {what} into torch.empty_like(parameter)"
    )


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


def _as_groups(parameters: Iterable[nn.Parameter] | Iterable[Group]) -> list[Group]:
    given = list(parameters)
    groups = [dict(each) for each in given if isinstance(each, dict)]
    trainable = [each for each in given if isinstance(each, nn.Parameter) and each.requires_grad]
    return groups or [{"params": trainable}]


def _accepts(optimizer: OptimizerFactory, name: str) -> bool:
    parameters = signature_of(optimizer).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _check_no_decay(optimizer: OptimizerFactory, groups: list[Group], weight_decay: float) -> None:
    found = [value for value in (weight_decay, *(group.get("weight_decay", 0) for group in groups)) if value]
    if found:
        name = getattr(optimizer, "__name__", str(optimizer))
        raise ValueError(f"{name} has no weight decay: expected weight_decay 0 everywhere, got {found[0]:g}")
