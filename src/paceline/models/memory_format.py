"""Memory layout of parameters: channels last, and strides that match between parameter, gradient and state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


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
