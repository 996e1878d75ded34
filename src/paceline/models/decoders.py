"""Decoders that label every pixel, on any image backbone of timm or torchvision: U-Net and feature pyramid.

Inside, maps grow by repeating pixels, whose backward pass is deterministic on every device; only the few channels of
the logits are interpolated, for which torch has a deterministic way where that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count
from paceline.core.registry import register
from paceline.models.encoders import build_encoder
from paceline.models.minet import Unit
from paceline.models.zoo import BackboneName, LibraryArgs

_WIDEST, _NARROWEST = 128, 16
_FINEST_STRIDE = 4


class PixelClassifier(nn.Module):
    """A backbone, a decoder that joins its maps into one, and a head; see `unet` and `fpn`."""

    def __init__(self, backbone: nn.Module, decoder: nn.Module, width: int, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.decoder = decoder
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, num_classes, H, W] of images [N, in_channels, H, W]."""
        features = self.decoder(self.backbone(images))  # [N, width, h, w], the size of the finest map that is used
        return F.interpolate(self.head(features), size=images.shape[-2:], mode="bilinear", align_corners=False)


class UNetDecoder(nn.Module):
    """Joins the maps one after the other, from the coarsest to the finest."""

    def __init__(self, channels: Sequence[int], widths: Sequence[int]) -> None:
        super().__init__()
        # One cheap convolution first: the coarsest map of a classifier may have more than a thousand channels.
        self.enter = _pointwise(channels[-1], widths[0])
        before = [widths[0], *widths[:-1]]
        self.steps = nn.ModuleList(map(Joining, before, reversed(channels[:-1]), widths))

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        """[N, widths[-1], h, w] of levels [N, channels[i], h_i, w_i], finest first."""
        features: Tensor = self.enter(levels[-1])
        for step, finer in zip(self.steps, reversed(levels[:-1]), strict=True):
            features = step(features, finer)
        return features


class Joining(nn.Module):
    """Coarse features brought to the size of finer ones, put beside them, then two convolutions."""

    def __init__(self, in_channels: int, fine_channels: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(Unit(in_channels + fine_channels, width), Unit(width, width))

    def forward(self, coarse: Tensor, fine: Tensor) -> Tensor:
        """[N, width, H, W] of [N, in_channels, h, w] and [N, fine_channels, H, W]."""
        joined: Tensor = self.body(torch.cat([_repeated(coarse, fine), fine], dim=1))
        return joined


class PyramidDecoder(nn.Module):
    """Brings every map to one width, adds the coarser ones to each, and sums them all at the size of the finest."""

    def __init__(self, channels: Sequence[int], num_skipped: int, width: int) -> None:
        super().__init__()
        self.num_skipped = num_skipped
        self.levels = nn.ModuleList(PyramidLevel(each, width) for each in channels[num_skipped:])
        self.finish = Unit(width, width)

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        """[N, width, h, w] of levels [N, channels[i], h_i, w_i], finest first; the finest may be skipped."""
        maps = levels[self.num_skipped :]
        down, total = self.levels[-1](maps[-1], None)
        for index in reversed(range(len(maps) - 1)):
            down, smooth = self.levels[index](maps[index], down)
            total = smooth + _repeated(total, smooth)
        finished: Tensor = self.finish(total)
        return finished


class PyramidLevel(nn.Module):
    """A map at the pyramid's width with the coarser ones added: as it is, for the next finer level, and smoothed."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.lateral = _pointwise(in_channels, width)
        self.smooth = Unit(width, width)

    def forward(self, features: Tensor, down: Tensor | None) -> tuple[Tensor, Tensor]:
        """Two maps [N, width, H, W] of features [N, in_channels, H, W] and the level above [N, width, h, w]."""
        own = self.lateral(features)
        if down is not None:
            own = own + _repeated(down, own)
        return own, self.smooth(own)


@register.model("unet")
def unet(
    num_classes: int,
    in_channels: int = 3,
    backbone: BackboneName = "timm/mobilenetv2_100",
    widths: Annotated[
        Annotated[Sequence[Count], Field(min_length=1)] | None,
        Field(description="Channels of each step, coarsest first; one less than the maps that the backbone gives."),
    ] = None,
    backbone_args: LibraryArgs | None = None,
) -> PixelClassifier:
    """A U-Net. Widths are those of its steps, coarsest first; without them 128, 64, 32, 16, and no less."""
    module, channels, _ = build_encoder(backbone, in_channels, backbone_args or {})
    num_steps = len(channels) - 1
    widths = list(widths or (max(_WIDEST >> step, _NARROWEST) for step in range(num_steps)))
    if len(widths) != num_steps:
        raise ValueError(
            f"widths {widths}: {backbone} gives {len(channels)} maps, joined in {num_steps} steps;"
            " expected one number for each step"
        )
    return PixelClassifier(module, UNetDecoder(channels, widths), widths[-1], num_classes)


@register.model("fpn")
def fpn(
    num_classes: int,
    in_channels: int = 3,
    backbone: BackboneName = "timm/mobilenetv2_100",
    width: Count = 64,
    backbone_args: LibraryArgs | None = None,
) -> PixelClassifier:
    """A feature pyramid over the backbone's maps from stride 4 on."""
    module, channels, strides = build_encoder(backbone, in_channels, backbone_args or {})
    num_skipped = sum(stride < _FINEST_STRIDE for stride in strides[:-1])
    return PixelClassifier(module, PyramidDecoder(channels, num_skipped, width), width, num_classes)


def _pointwise(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)
    )


def _repeated(features: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(features, size=like.shape[-2:], mode="nearest-exact")
