"""A new model made ready to be trained: lazy layers, its device, its memory layout and strides.

Fused optimizers pair elements by address: a parameter, its gradient and its state must have equal strides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from paceline.data.split_loader import SplitLoader
from paceline.models.norm import convert_sync_batchnorm

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def initialize_lazy_layers(model: nn.Module, loader: SplitLoader) -> None:
    """Initialize lazy layers, if there are any, with the first images."""
    if not any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        return
    ids = np.arange(min(2, len(loader.dataset)))
    batch = loader.transform_batch(loader.fetch(0, ids), 0, torch.device("cpu"))
    model.eval()
    with torch.no_grad():
        model(batch["image"])
    model.train()


def place_model(
    model: nn.Module, device: torch.device, channels_last: bool = False, sync_bn: bool = False
) -> nn.Module:
    """Put a model on its device, in its memory layout, before anything holds its parameters.

    With `sync_bn` its BatchNorm layers share their statistics over all processes; ValueError if it has none.
    """
    model.to(device)
    if sync_bn and not convert_sync_batchnorm(model):
        raise ValueError("the model has no BatchNorm layers")
    make_dense(model)
    if channels_last:
        use_channels_last(model)
    return model


def use_channels_last(model: nn.Module) -> None:
    """Store weights and inputs channels last; names and values stay the same."""
    for parameter in model.parameters():
        if parameter.ndim in _FORMATS:
            parameter.data = parameter.data.contiguous(memory_format=_FORMATS[parameter.ndim])
    model.register_forward_pre_hook(_convert_inputs)


def _convert_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.contiguous(memory_format=_FORMATS[value.ndim])
        if isinstance(value, Tensor) and value.ndim in _FORMATS
        else value
        for value in inputs
    )


def make_dense(model: nn.Module) -> None:
    """Give parameters that are views of larger tensors their own memory: gradients cannot have their strides."""
    for parameter in model.parameters():
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            parameter.data = parameter.data.contiguous()


def has_strides_of(tensor: Tensor, like: Tensor) -> bool:
    """Whether two tensors of one shape have equal strides, dimensions of size 1 aside."""
    ours, theirs = tensor.stride(), like.stride()
    return ours == theirs or all(
        size == 1 or our == their for our, their, size in zip(ours, theirs, like.shape, strict=True)
    )


def with_strides_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with the strides of another of its shape; itself if it has them."""
    if has_strides_of(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
