"""A new model made ready to be trained: lazy layers, the device, the memory layout."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from paceline.data.split_loader import SplitLoader
from paceline.models.memory_format import make_dense, use_channels_last
from paceline.models.norm import convert_sync_batchnorm


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
