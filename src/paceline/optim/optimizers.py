"""Making an optimizer in the fastest form that runs on the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

_FUSED_ON_CPU = {"SGD", "Adam", "AdamW", "Adagrad"}


def make_optimizer(
    optimizer: Callable[..., Optimizer],
    parameters: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float,
    arguments: dict[str, Any],
) -> Optimizer:
    """The optimizer over the parameters that learn, fused where torch can do that."""
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    if "fused" in inspect.signature(optimizer).parameters and _can_fuse(optimizer, learning):
        arguments = {"fused": True, **arguments}
    return optimizer(learning, lr=lr, weight_decay=weight_decay, **arguments)


def _can_fuse(optimizer: Callable[..., Optimizer], parameters: list[nn.Parameter]) -> bool:
    devices = {parameter.device.type for parameter in parameters}
    is_float = all(parameter.is_floating_point() for parameter in parameters)
    return is_float and (devices == {"cuda"} or (devices == {"cpu"} and optimizer.__name__ in _FUSED_ON_CPU))
