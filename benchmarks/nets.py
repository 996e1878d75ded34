"""The networks of the step benchmark. Each notes the moment of every forward pass, for all contestants alike."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from torch import Tensor, nn

from paceline.core.registry import register
from paceline.models.convnet import ConvNet

moments: list[float] = []
"""When the forward passes since the list was last cleared began."""


@register.model("benchmark_mlp")
class Mlp(nn.Module):
    """784-128-10: so little work that the cost of the loop around it shows."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(in_channels * 28 * 28, 128)
        self.head = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, num_classes]."""
        moments.append(perf_counter())
        logits: Tensor = self.head(self.hidden(images.flatten(1)).relu())
        return logits


@register.model("benchmark_small_mlp")
class SmallMlp(nn.Module):
    """64-64-10, of every third pixel of the middle: nearly all of a step is the loop around it."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(in_channels * 8 * 8, 64)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, num_classes]."""
        moments.append(perf_counter())
        logits: Tensor = self.head(self.hidden(images[..., 2:26:3, 2:26:3].flatten(1)).relu())
        return logits


@register.model("benchmark_convnet")
class SmallConvNet(ConvNet):
    """The quickstart's network, narrower."""

    def __init__(self, num_classes: int, in_channels: int, widths: Sequence[int] = (8, 16)) -> None:
        super().__init__(num_classes, in_channels, widths)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, num_classes]."""
        moments.append(perf_counter())
        return super().forward(images)
