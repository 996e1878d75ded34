"""SlowFast-R50: a slow pathway with many channels and few frames, and a thin fast one with all frames.

Lateral connections concatenate fast features to slow ones after the stem and after each stage but the last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count, PartialShare
from paceline.core.registry import register

Kernel = tuple[int, int, int]

_DEPTHS = (3, 4, 6, 3)
_SLOW_WIDTH, _FAST_WIDTH = 64, 8  # of the stems; beta is 1/8
_LATERAL_FRAMES = 7  # of the published 8×8 network; the paper's text has 5


@register.model("slowfast_r50")
class SlowFast(nn.Module):
    """SlowFast with ResNet-50 pathways; the slow one gets every `alpha`-th frame of the clip.

    The published 8×8 model takes 32 frames at an interval of 2; any other number works.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        alpha: Annotated[Count, Field(description="The slow pathway gets every alpha-th frame.")] = 4,
        dropout: PartialShare = 0.5,
    ) -> None:
        super().__init__()
        self.alpha = alpha
        fast_channels = [_FAST_WIDTH, *(4 * _FAST_WIDTH << stage for stage in range(3))]  # inputs of laterals
        lateral_channels = [2 * channels for channels in fast_channels]
        self.slow = _pathway(in_channels, _SLOW_WIDTH, (1, 1, 1, 3, 3), lateral_channels)
        self.fast = _pathway(in_channels, _FAST_WIDTH, (5, 3, 3, 3, 3), [0] * 4)
        self.laterals = nn.ModuleList(
            _conv_bn_relu(inputs, outputs, (_LATERAL_FRAMES, 1, 1), (alpha, 1, 1))
            for inputs, outputs in zip(fast_channels, lateral_channels, strict=True)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32 * (_SLOW_WIDTH + _FAST_WIDTH), num_classes)
        self.apply(_initialize)

    def forward(self, clips: Tensor) -> Tensor:
        """Logits [N, num_classes] of clips [N, in_channels, T, H, W]."""
        slow = self.slow[0](clips[:, :, :: self.alpha])  # [N, 64, T / alpha, H / 4, W / 4]
        fast = self.fast[0](clips)  # [N, 8, T, H / 4, W / 4]
        for lateral, slow_stage, fast_stage in zip(self.laterals, self.slow[1:], self.fast[1:], strict=True):
            slow = slow_stage(torch.cat([slow, lateral(fast)], dim=1))
            fast = fast_stage(fast)
        pooled = torch.cat([slow.mean(dim=(2, 3, 4)), fast.mean(dim=(2, 3, 4))], dim=1)
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with a skip connection; the first spans `frames` frames."""

    def __init__(self, in_channels: int, width: int, frames: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv_bn_relu(in_channels, width, (frames, 1, 1)),
            _conv_bn_relu(width, width, (1, 3, 3), (1, stride, stride)),
            _conv_bn_relu(width, 4 * width, (1, 1, 1))[:2],
        )
        nn.init.zeros_(self.get_parameter("body.2.norm.weight"))  # the block starts as the identity
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != 4 * width:
            self.shortcut = _conv_bn_relu(in_channels, 4 * width, (1, 1, 1), (1, stride, stride))[:2]

    def forward(self, x: Tensor) -> Tensor:
        """[N, 4 · width, T, H / stride, W / stride] of [N, in_channels, T, H, W]."""
        return F.relu(self.shortcut(x) + self.body(x))


class SpatialMaxPool(nn.Module):
    """3×3 max pooling with stride 2 in each frame.

    Frames are pooled as channels, since 3D max pooling has no deterministic backward pass on GPUs.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, T, H / 2, W / 2] of [N, C, T, H, W]."""
        pooled = F.max_pool2d(x.flatten(1, 2), 3, stride=2, padding=1)
        return pooled.reshape(*x.shape[:3], *pooled.shape[2:])


def _pathway(in_channels: int, width: int, frames: Sequence[int], lateral_channels: Sequence[int]) -> nn.ModuleList:
    """The stem and four stages; `frames` are the temporal kernel sizes of each."""
    stem = _conv_bn_relu(in_channels, width, (frames[0], 7, 7), (1, 2, 2))
    stem.add_module("pool", SpatialMaxPool())
    parts = [stem]
    channels = width
    for stage, depth in enumerate(_DEPTHS):
        stage_width = width << stage
        first = Bottleneck(channels + lateral_channels[stage], stage_width, frames[stage + 1], 2 if stage else 1)
        others = (Bottleneck(4 * stage_width, stage_width, frames[stage + 1], 1) for _ in range(depth - 1))
        parts.append(nn.Sequential(first, *others))
        channels = 4 * stage_width
    return nn.ModuleList(parts)


def _conv_bn_relu(in_channels: int, out_channels: int, kernel: Kernel, stride: Kernel = (1, 1, 1)) -> nn.Sequential:
    padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
    convolution = nn.Conv3d(in_channels, out_channels, kernel, stride, padding, bias=False)
    return nn.Sequential(
        OrderedDict(convolution=convolution, norm=nn.BatchNorm3d(out_channels), activation=nn.ReLU(inplace=True))
    )


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv3d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)
