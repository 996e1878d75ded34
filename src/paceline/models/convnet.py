"""A small residual convolutional net for machines without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count, PartialShare
from paceline.core.registry import register


@register.model("convnet")
class ConvNet(nn.Module):
    """Stages of residual blocks, each at half the resolution of the one before; then mean, dropout, linear."""

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


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(ConvBNReLU(width, width), ConvBNReLU(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[N, width, H, W] to the same shape."""
        out: Tensor = x + self.body(x)
        return out


def _stage(in_channels: int, width: int, depth: int) -> nn.Sequential:
    blocks = [ResidualBlock(width) for _ in range(depth)]
    return nn.Sequential(ConvBNReLU(in_channels, width), nn.MaxPool2d(2, ceil_mode=True), *blocks)


class ConvBNReLU(nn.Sequential):
    """A convolution without bias, BatchNorm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )
