"""How images lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def use_channels_last(model: nn.Module) -> None:
    """Have weights and inputs lie pixel by pixel; names and values stay as they are."""
    for parameter in model.parameters():
        if parameter.ndim in _FORMATS:
            parameter.data = parameter.data.contiguous(memory_format=_FORMATS[parameter.ndim])
    model.register_forward_pre_hook(_lay_out)


def _lay_out(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.contiguous(memory_format=_FORMATS[value.ndim])
        if isinstance(value, Tensor) and value.ndim in _FORMATS
        else value
        for value in inputs
    )
