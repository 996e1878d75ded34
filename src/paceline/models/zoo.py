"""Models of timm and torchvision by name; each library is imported only when a recipe names it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from paceline.models.torchvision_ops import import_torchvision


def build_timm(name: str, num_classes: int, in_channels: int, args: dict[str, Any]) -> nn.Module:
    """A timm model with its own initialisation; weights are never downloaded here."""
    import_torchvision()  # timm imports it, so it must come in through our door
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=in_channels, **args)
    return model


def build_torchvision(name: str, num_classes: int, in_channels: int, args: dict[str, Any]) -> nn.Module:
    """A torchvision model with its own initialisation; weights are never downloaded here."""
    torchvision = import_torchvision()
    builder = torchvision.models.get_model_builder(name)
    no_weights = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}
    model: nn.Module = builder(**no_weights, num_classes=num_classes, **args)
    if in_channels != 3:
        _replace_first_convolution(model, in_channels)
    return model


def _replace_first_convolution(model: nn.Module, in_channels: int) -> None:
    """Torchvision's models take three channels; another number gets a fresh first convolution of the same form."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            parent = model.get_submodule(name.rpartition(".")[0])
            fresh = nn.Conv2d(
                in_channels,
                module.out_channels,
                module.kernel_size,  # type: ignore[arg-type]
                module.stride,  # type: ignore[arg-type]
                module.padding,  # type: ignore[arg-type]
                bias=module.bias is not None,
            )
            setattr(parent, name.rpartition(".")[2], fresh)
            return
    raise ValueError(f"{type(model).__name__} takes images of 3 channels, the data has {in_channels}")
