"""A small residual convolutional net: the default where no GPU is at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count, PartialShare
from paceline.core.registry import register


@register.model("convnet")
class ConvNet(nn.Module):
    """Stages of residual blocks, each stage at half the resolution of the one before; then mean, dropout, linear."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        widths: Annotated[Sequence[Count], Field(min_length=1, max_length=6)] = (32, 64, 128),
        depth: Annotated[int, Field(ge=1, le=1000)] = 1,
        dropout: PartialShare = 0.0,
    ) -> None:
        super().__init__()
        channels = [in_channels, *widths]
        self.stages = nn.Sequential(*(_stage(channels[i], width, depth) for i, width in enumerate(widths)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, num_classes] of images [N, in_channels, H, W]."""
        features = self.stages(images)  # [N, widths[-1], H / 2^stages, W / 2^stages]
        pooled = self.pool(features).flatten(1)  # [N, widths[-1]]
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


class Residual(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_convolution(width, width), _convolution(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[N, width, H, W] to the same shape."""
        out: Tensor = x + self.body(x)
        return out


def _stage(in_channels: int, width: int, depth: int) -> nn.Sequential:
    blocks = [Residual(width) for _ in range(depth)]
    return nn.Sequential(_convolution(in_channels, width), nn.MaxPool2d(2, ceil_mode=True), *blocks)


def _convolution(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
