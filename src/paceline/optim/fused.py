"""An optimizer in the fastest form that runs on the device, and what the fused form must not be given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.errors import TrainingError
from paceline.models.memory_format import has_strides_of

MakesOptimizer = Callable[..., Optimizer]
Group = dict[str, Any]
"""Parameters under "params" with their own "lr" and "weight_decay"; any further keys stay with the group."""

# Where torch has no fused form it chooses itself: over all tensors at once on a GPU, where that is faster than one by
# one; on a CPU it is slower, because each pass over all tensors finds the caches full of others.
_FUSED = {
    "cpu": {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad},
    "cuda": {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW},
}
_FUSED_IN_PARTS = {torch.optim.Adam, torch.optim.AdamW}
# On a CPU. Torch 2.13's SGD leaves such weights as they are and fills their momentum with rubbish; Adagrad makes its
# state before weights become half, and then refuses it.
_FUSED_IN_HALF = (torch.optim.Adam, torch.optim.AdamW)


def construct(optimizer: MakesOptimizer, groups: Sequence[Group], **options: Any) -> Optimizer:
    """The optimizer over these groups, fused where that is faster and right."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    devices = {parameter.device.type for parameter in parameters}
    can_fuse = (
        len(devices) == 1
        and optimizer in _FUSED.get(devices.pop(), ())
        and (optimizer in _FUSED_IN_PARTS or not any(hasattr(parameter, "placements") for parameter in parameters))
        and all(parameter.is_floating_point() for parameter in parameters)
        and not options.get("dampening")  # see _begin_momentum
    )
    if not can_fuse:
        return optimizer(groups, **options)
    fused = optimizer(groups, fused=True, **options)
    if isinstance(fused, torch.optim.SGD):
        fused.register_step_pre_hook(_begin_momentum)
    fused.register_step_pre_hook(_StrideCheck())
    unfuse_half(fused)
    return fused


def unfuse_half(optimizer: Optimizer) -> None:
    """Have groups with half-precision weights on a CPU take the plain form, where the fused one is wrong for them."""
    for group in optimizer.param_groups:
        is_half = any(each.device.type == "cpu" and each.dtype.itemsize == 2 for each in group["params"])
        if group.get("fused") and is_half and not isinstance(optimizer, _FUSED_IN_HALF):
            group["fused"] = False


class _StrideCheck:
    """Raises before a fused step that would pair the elements of a weight with those of others.

    Gradients are looked at in every step, the optimizer's state when it is new: a step changes it in place.
    """

    def __init__(self) -> None:
        self._state: dict[Any, Any] = {}
        self._size = 0

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        state = optimizer.state
        is_new = self._state is not state or self._size != len(state)
        for parameter in (each for group in optimizer.param_groups if group["fused"] for each in group["params"]):
            if parameter.grad is not None and not has_strides_of(parameter.grad, parameter):
                _refuse(optimizer, parameter, "gradient", parameter.grad)
            for key, value in state.get(parameter, {}).items() if is_new else ():
                is_shaped_so = isinstance(value, Tensor) and value.shape == parameter.shape
                if is_shaped_so and not has_strides_of(value, parameter):
                    _refuse(optimizer, parameter, key, value)
        self._state, self._size = state, len(state)


def _refuse(optimizer: Optimizer, parameter: nn.Parameter, what: str, tensor: Tensor) -> None:
    names = {
        id(each): name
        for group in optimizer.param_groups
        for each, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    raise TrainingError(
        f"parameter {names.get(id(parameter), '')} {list(parameter.shape)} has strides {parameter.stride()}, its {what}"
        f" has {tensor.stride()}: expected equal strides, since a fused optimizer pairs elements by their address."
        f" Copy the {what} into torch.empty_like(parameter)"
    )


def _begin_momentum(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give parameters whose first gradient this is a momentum of 0, which is how they begin without dampening.

    The fused step of torch fails on its own where some parameters of a group have one and others do not yet.
    """
    state = optimizer.state
    for group in optimizer.param_groups:
        if group["momentum"]:
            for parameter in group["params"]:
                if parameter.grad is not None and state[parameter].get("momentum_buffer") is None:
                    state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
