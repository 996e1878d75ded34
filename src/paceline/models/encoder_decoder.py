"""U-Net and FPN: pixel classifiers on any image backbone of timm or torchvision.

Inside, maps are upsampled by nearest neighbor, whose backward pass is deterministic on every device. Only the logits,
with few channels, are upsampled bilinearly, for which torch has a deterministic implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count
from paceline.core.registry import register
from paceline.core.torchvision_ops import import_torchvision
from paceline.models.convnet import ConvBNReLU
from paceline.models.zoo import BackboneName, LibraryArgs, build_torchvision

_MAX_WIDTH, _MIN_WIDTH = 128, 16
_FINEST_STRIDE = 4


@register.model("unet")
def unet(
    num_classes: int,
    in_channels: int = 3,
    backbone: BackboneName = "timm/mobilenetv2_100",
    widths: Annotated[
        Annotated[Sequence[Count], Field(min_length=1)] | None,
        Field(description="Channels of each decoder stage, coarsest first; one less than the backbone has maps."),
    ] = None,
    backbone_args: LibraryArgs | None = None,
) -> PixelClassifier:
    """U-Net on a backbone; `widths` are the channels of its decoder stages, by default 128, 64, 32, 16, 16 …"""
    encoder, channels, _ = build_encoder(backbone, in_channels, backbone_args or {})
    num_stages = len(channels) - 1
    widths = list(widths or (max(_MAX_WIDTH >> stage, _MIN_WIDTH) for stage in range(num_stages)))
    if len(widths) != num_stages:
        raise ValueError(
            f"widths {widths}: {backbone} has {len(channels)} maps, joined in {num_stages} stages; expected one number"
            " for each stage"
        )
    return PixelClassifier(encoder, UNetDecoder(channels, widths), widths[-1], num_classes)


@register.model("fpn")
def fpn(
    num_classes: int,
    in_channels: int = 3,
    backbone: BackboneName = "timm/mobilenetv2_100",
    width: Count = 64,
    backbone_args: LibraryArgs | None = None,
) -> PixelClassifier:
    """Feature pyramid network on a backbone's maps of stride 4 and more."""
    encoder, channels, strides = build_encoder(backbone, in_channels, backbone_args or {})
    num_skipped = sum(stride < _FINEST_STRIDE for stride in strides[:-1])
    return PixelClassifier(encoder, FPNDecoder(channels, num_skipped, width), width, num_classes)


class PixelClassifier(nn.Module):
    """A backbone, a decoder that joins its maps, and a 1×1 convolution as head."""

    def __init__(self, backbone: nn.Module, decoder: nn.Module, width: int, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.decoder = decoder
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, num_classes, H, W] of images [N, in_channels, H, W]."""
        features = self.decoder(self.backbone(images))  # [N, width, h, w], the size of the finest map used
        return F.interpolate(self.head(features), size=images.shape[-2:], mode="bilinear", align_corners=False)


class UNetDecoder(nn.Module):
    """Joins the maps one after the other, from the coarsest to the finest."""

    def __init__(self, channels: Sequence[int], widths: Sequence[int]) -> None:
        super().__init__()
        # A cheap 1×1 convolution first: the coarsest map may have more than a thousand channels.
        self.bottleneck = ConvBNReLU(channels[-1], widths[0], kernel_size=1)
        in_channels = [widths[0], *widths[:-1]]
        self.stages = nn.ModuleList(map(UpBlock, in_channels, reversed(channels[:-1]), widths))

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """[N, widths[-1], h, w] of maps [N, channels[i], h_i, w_i], finest first."""
        features: Tensor = self.bottleneck(maps[-1])
        for stage, skip in zip(self.stages, reversed(maps[:-1]), strict=True):
            features = stage(features, skip)
        return features


class UpBlock(nn.Module):
    """Upsampled features concatenated with a skip connection, then two convolutions."""

    def __init__(self, in_channels: int, skip_channels: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(ConvBNReLU(in_channels + skip_channels, width), ConvBNReLU(width, width))

    def forward(self, features: Tensor, skip: Tensor) -> Tensor:
        """[N, width, H, W] of [N, in_channels, h, w] and [N, skip_channels, H, W]."""
        joined: Tensor = self.body(torch.cat([_upsample(features, skip), skip], dim=1))
        return joined


class FPNDecoder(nn.Module):
    """A top-down pyramid whose levels are summed at the size of the finest."""

    def __init__(self, channels: Sequence[int], num_skipped: int, width: int) -> None:
        super().__init__()
        self.num_skipped = num_skipped
        self.levels = nn.ModuleList(FPNLevel(each, width) for each in channels[num_skipped:])
        self.fuse = ConvBNReLU(width, width)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """[N, width, h, w] of maps [N, channels[i], h_i, w_i], finest first; the first `num_skipped` are not used."""
        used = maps[self.num_skipped :]
        top_down, total = self.levels[-1](used[-1], None)
        for index in reversed(range(len(used) - 1)):
            top_down, smooth = self.levels[index](used[index], top_down)
            total = smooth + _upsample(total, smooth)
        fused: Tensor = self.fuse(total)
        return fused


class FPNLevel(nn.Module):
    """A lateral connection plus the coarser level; the sum goes on top-down, and smoothed into the result."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.lateral = ConvBNReLU(in_channels, width, kernel_size=1)
        self.smooth = ConvBNReLU(width, width)

    def forward(self, features: Tensor, top_down: Tensor | None) -> tuple[Tensor, Tensor]:
        """Two maps [N, width, H, W] of features [N, in_channels, H, W] and the coarser level [N, width, h, w]."""
        own = self.lateral(features)
        if top_down is not None:
            own = own + _upsample(top_down, own)
        return own, self.smooth(own)


def _upsample(features: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(features, size=like.shape[-2:], mode="nearest-exact")


class Encoder(NamedTuple):
    """A backbone from images to a list of maps, finest first.

    Parameters keep the names of their library, so a file of its weights loads with `weights.into: backbone`.
    """

    module: nn.Module
    channels: list[int]
    strides: list[int]


def build_encoder(name: str, in_channels: int, args: LibraryArgs) -> Encoder:
    """The encoder of a name such as `timm/mobilenetv2_100` or `torchvision/mobilenet_v2`, with random weights."""
    library, _, member = name.partition("/")
    if library == "timm":
        return _build_timm(member, in_channels, args)
    return _build_torchvision(member, in_channels, args)


def _build_timm(name: str, in_channels: int, args: LibraryArgs) -> Encoder:
    import_torchvision()  # timm imports it, which fails without its compiled operators
    import timm

    try:
        module: Any = timm.create_model(name, pretrained=False, features_only=True, in_chans=in_channels, **args)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"backbone 'timm/{name}' has no feature maps: {error}") from error
    if str(getattr(module, "output_fmt", "NCHW")).endswith("NHWC"):
        module.register_forward_hook(_to_nchw)
    return Encoder(module, module.feature_info.channels(), module.feature_info.reduction())


def _to_nchw(module: nn.Module, inputs: Any, maps: list[Tensor]) -> list[Tensor]:
    return [each.permute(0, 3, 1, 2).contiguous() for each in maps]


_CLASSIFIER_NAMES = ("avgpool", "classifier", "fc", "head", "heads", "aux1", "AuxLogits")
_SEQUENCE_NAMES = ("features", "layers", "trunk_output")
_TRIAL_HEIGHT, _TRIAL_WIDTH = 64, 96


class TorchvisionEncoder(nn.Module):
    """The layers of a torchvision classifier up to its pooling, under the same names.

    torchvision's `create_feature_extractor` needs the node names of each architecture; here they are found by a trial.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, child in model.named_children():
            if name in _CLASSIFIER_NAMES:
                break
            # A ModuleDict cannot be mistaken for a sequence that is called as a whole.
            self.add_module(name, nn.ModuleDict(dict(child.named_children())) if name in _SEQUENCE_NAMES else child)
        self.output_layers: set[str] = set()
        """The last layer of each resolution."""

    def forward(self, images: Tensor) -> list[Tensor]:
        """The last map of each resolution, finest first."""
        return [features for name, features in self.trace(images) if name in self.output_layers]

    def trace(self, images: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The name and output of each layer in turn."""
        features = images
        for name, child in self.named_children():
            for key, layer in child.items() if isinstance(child, nn.ModuleDict) else [("", child)]:
                features = layer(features)
                yield f"{name}.{key}".rstrip("."), features


def _build_torchvision(name: str, in_channels: int, args: LibraryArgs) -> Encoder:
    encoder = TorchvisionEncoder(build_torchvision(name, 1, in_channels, args)).eval()
    last: dict[int, tuple[str, int]] = {}  # height → last layer and its channels
    try:
        with torch.no_grad():
            for layer, maps in encoder.trace(torch.zeros(1, in_channels, _TRIAL_HEIGHT, _TRIAL_WIDTH)):
                _, channels, height, width = maps.shape
                if abs(height / width - _TRIAL_HEIGHT / _TRIAL_WIDTH) > 0.1:
                    raise ValueError(f"{layer} outputs {list(maps.shape)}")
                last[height] = (layer, channels)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:  # whatever a layer raises for a wrong input
        raise ValueError(
            f"backbone 'torchvision/{name}' does not output maps [N, C, H, W] layer by layer ({error}); use timm's"
        ) from error
    encoder.output_layers = {layer for layer, _ in last.values()}
    strides = [round(_TRIAL_HEIGHT / height) for height in last]
    return Encoder(encoder.train(), [channels for _, channels in last.values()], strides)
