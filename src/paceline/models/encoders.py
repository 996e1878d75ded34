"""Image classifiers of timm and torchvision without their classifiers: maps of several resolutions.

An encoder keeps the names that its library gives to the parameters, so a file of that library's weights fits after
`backbone.` has been put before its names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.torchvision_ops import import_torchvision
from paceline.models.zoo import LibraryArgs, build_torchvision

_CLASSIFYING = ("avgpool", "classifier", "fc", "head", "heads", "aux1", "AuxLogits")
"""What torchvision's models call the first thing behind their maps."""
_SEQUENCES = ("features", "layers", "trunk_output")
"""What they call the sequence that holds layers of several resolutions."""
_TRIAL_HEIGHT, _TRIAL_WIDTH = 64, 96


class Encoder(NamedTuple):
    """A module from images to a list of maps, finest first, and what is known about the maps."""

    module: nn.Module
    channels: list[int]
    strides: list[int]
    """Pixels of the image for each step in a map."""


def build_encoder(name: str, in_channels: int, args: LibraryArgs) -> Encoder:
    """The encoder of a name such as `timm/mobilenetv2_100` or `torchvision/mobilenet_v2`, with fresh weights."""
    library, _, member = name.partition("/")
    if library == "timm":
        return _build_timm(member, in_channels, args)
    if library == "torchvision":
        return _build_torchvision(member, in_channels, args)
    raise ValueError(f"backbone {name!r}: expected timm/NAME or torchvision/NAME")


class TorchvisionLevels(nn.Module):
    """The layers of a torchvision model up to its classifier, under the names that they have there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, child in model.named_children():
            if name in _CLASSIFYING:
                break
            # Its layers are called one by one; nobody should take it for a sequence that is called as a whole.
            self.add_module(name, nn.ModuleDict(dict(child.named_children())) if name in _SEQUENCES else child)
        self.ends: set[str] = set()
        """The layers after which a resolution is left."""

    def forward(self, images: Tensor) -> list[Tensor]:
        """The last map of each resolution, finest first."""
        return [features for name, features in self.trace(images) if name in self.ends]

    def trace(self, images: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What each layer gives in turn, under the layer's name."""
        features = images
        for name, child in self.named_children():
            for key, layer in child.items() if isinstance(child, nn.ModuleDict) else [("", child)]:
                features = layer(features)
                yield f"{name}.{key}".rstrip("."), features


def _build_torchvision(name: str, in_channels: int, args: LibraryArgs) -> Encoder:
    levels = TorchvisionLevels(build_torchvision(name, 1, in_channels, args)).eval()
    last: dict[int, tuple[str, int]] = {}  # of each height: the last layer, and its channels
    try:
        with torch.no_grad():
            for layer, maps in levels.trace(torch.zeros(1, in_channels, _TRIAL_HEIGHT, _TRIAL_WIDTH)):
                _, channels, height, width = maps.shape
                if abs(height / width - _TRIAL_HEIGHT / _TRIAL_WIDTH) > 0.1:
                    raise ValueError(f"{layer} gives {list(maps.shape)}")
                last[height] = (layer, channels)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:  # whatever a layer says of a wrong input
        raise ValueError(
            f"backbone 'torchvision/{name}' does not give maps [N, C, H, W] layer by layer ({error}); take timm's"
        ) from error
    levels.ends = {layer for layer, _ in last.values()}
    strides = [round(_TRIAL_HEIGHT / height) for height in last]
    return Encoder(levels.train(), [channels for _, channels in last.values()], strides)


def _build_timm(name: str, in_channels: int, args: LibraryArgs) -> Encoder:
    import_torchvision()  # timm imports it, so it must come in through our door
    import timm

    try:
        module: Any = timm.create_model(name, pretrained=False, features_only=True, in_chans=in_channels, **args)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"backbone 'timm/{name}' gives no maps of several resolutions: {error}") from error
    if str(getattr(module, "output_fmt", "NCHW")).endswith("NHWC"):
        module.register_forward_hook(_channels_first)
    return Encoder(module, module.feature_info.channels(), module.feature_info.reduction())


def _channels_first(module: nn.Module, inputs: Any, maps: list[Tensor]) -> list[Tensor]:
    return [each.permute(0, 3, 1, 2).contiguous() for each in maps]
