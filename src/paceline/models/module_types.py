"""Norm layers, memory layout, and first convolutions with another number of channels."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.core.text import pluralize

NORM_TYPES = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Torch's own; what derives from one is a norm layer whatever it is called."""

# Those that derive from none of torch's: RmsNorm2d, FrozenBatchNorm2d, LayerNormAct, EvoNorm2dS0, SimpleNormFp32 …
_NAME = re.compile(r"Norm(?:\d+d?|Act|Tlu|Fp32|[BS]\d[a-z]?)*$", re.IGNORECASE)


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm layer: by its type, else by the name of its type if it has tensors of its own."""
    if isinstance(module, NORM_TYPES):
        return True
    return bool(_NAME.search(type(module).__name__)) and bool(module._parameters or module._buffers)


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def use_channels_last(model: nn.Module) -> None:
    """Have weights and inputs lie pixel by pixel; names and values stay as they are."""
    for parameter in model.parameters():
        if parameter.ndim in _FORMATS:
            parameter.data = parameter.data.contiguous(memory_format=_FORMATS[parameter.ndim])
    model.register_forward_pre_hook(_lay_out)


def make_dense(model: nn.Module) -> None:
    """Give parameters that are slices of larger tensors memory of their own: their gradients cannot have gaps."""
    for parameter in model.parameters():
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            parameter.data = parameter.data.contiguous()


def has_strides_of(tensor: Tensor, like: Tensor) -> bool:
    """Whether two tensors of one shape have equal strides; that of a dimension of size 1 means nothing."""
    ours, theirs = tensor.stride(), like.stride()
    return ours == theirs or all(
        size == 1 or our == their for our, their, size in zip(ours, theirs, like.shape, strict=True)
    )


def with_strides_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with the strides of another of its shape; itself if it has them."""
    if has_strides_of(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _lay_out(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.contiguous(memory_format=_FORMATS[value.ndim])
        if isinstance(value, Tensor) and value.ndim in _FORMATS
        else value
        for value in inputs
    )


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_first_convolutions(model: nn.Module) -> list[str]:
    """The names of the modules that take the image: as the model says itself, else its first convolution."""
    described: Any = getattr(model, "default_cfg", None) or {}
    declared = described.get("first_conv") or ()
    modules = dict(model.named_modules())
    names = [name for name in ([declared] if isinstance(declared, str) else declared) if name in modules]
    if names:
        return names
    return next(([name] for name, module in modules.items() if isinstance(module, _CONVOLUTIONS)), [])


def fit_channels(kernel: Tensor, num_channels: int) -> tuple[Tensor, str] | None:
    """A kernel [out, in, …] for images of `num_channels`, and how; None where there is no rule.

    Each rule gives, for images whose channels repeat, what the kernel gave before: gray images are such to RGB.
    """
    found = kernel.shape[1]
    if num_channels == 1:
        return kernel.float().sum(dim=1, keepdim=True).to(
            kernel.dtype
        ), f"summed over its {pluralize(found, 'channel')}"
    if num_channels % found == 0:
        times = num_channels // found
        repeats = [1, times] + [1] * (kernel.ndim - 2)
        return kernel.repeat(*repeats) / times, f"repeated for {num_channels} channels and divided by {times}"
    return None


def reverse_channels(kernel: Tensor) -> Tensor:
    """A kernel for RGB images from one for BGR images."""
    return kernel.flip(1)
