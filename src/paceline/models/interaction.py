"""The parts of MINet that let features of several resolutions exchange what they know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class Unit(nn.Sequential):
    """A 3×3 convolution without bias, BatchNorm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )


class Mix(nn.Module):
    """ReLU(BatchNorm(sum of a 3×3 convolution of each input)), at the resolution of the input `own`."""

    def __init__(self, in_channels: Sequence[int], out_channels: int, own: int, up: str) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, out_channels, 3, padding=1) for channels in in_channels)
        self.norm = nn.BatchNorm2d(out_channels)
        self.own = own
        self.up = up

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """[N, out_channels, h, w] of inputs [N, in_channels[i], …], finest first."""
        own = inputs[self.own]
        summed: Tensor = self.convolutions[self.own](own)
        for index, (convolution, each) in enumerate(zip(self.convolutions, inputs, strict=True)):
            if index < self.own:
                summed = summed + convolution(halved(each, own.shape[-2:]))
            elif index > self.own:
                summed = summed + convolution(F.interpolate(each, size=own.shape[-2:], mode=self.up))
        return F.relu(self.norm(summed), inplace=True)


class AggregateInteraction(nn.Module):
    """Mixes a level of an encoder with its neighbours; `own` is its place among the two or three inputs."""

    def __init__(self, in_channels: Sequence[int], own: int, out_channels: int) -> None:
        super().__init__()
        mid = min(in_channels)
        count = len(in_channels)
        self.own = own
        self.enter = nn.ModuleList(_convolution_norm(channels, mid) for channels in in_channels)
        self.exchange = nn.ModuleList(_neighbour_mix(mid, count, index) for index in range(count))
        self.fuse = Mix([mid] * count, mid, own, "nearest")
        self.leave = _convolution_norm(mid, out_channels)
        self.shortcut = nn.Conv2d(in_channels[own], out_channels, 1)

    def forward(self, *levels: Tensor) -> Tensor:
        """[N, out_channels, h, w] of neighbouring levels [N, in_channels[i], h_i, w_i], finest first."""
        branches = [F.relu(enter(level), inplace=True) for enter, level in zip(self.enter, levels, strict=True)]
        branches = [mix(branches[_around(index, len(branches))]) for index, mix in enumerate(self.exchange)]
        mixed = self.leave(self.fuse(branches))
        return F.relu(mixed + self.shortcut(levels[self.own]), inplace=True)


class SelfInteraction(nn.Module):
    """Mixes features with themselves at half of the resolution; shape and channels stay."""

    def __init__(self, full_channels: int, half_channels: int) -> None:
        super().__init__()
        both = (full_channels, half_channels)
        self.enter = nn.ModuleList(_convolution_norm(full_channels, channels) for channels in both)
        self.exchange = nn.ModuleList(Mix(both, channels, own, "bilinear") for own, channels in enumerate(both))
        self.fuse = Mix(both, full_channels, 0, "bilinear")

    def forward(self, x: Tensor) -> Tensor:
        """[N, full_channels, H, W] to the same shape."""
        inputs = (x, halved(x))
        branches = [F.relu(enter(each), inplace=True) for enter, each in zip(self.enter, inputs, strict=True)]
        branches = [mix(branches) for mix in self.exchange]
        mixed: Tensor = self.fuse(branches) + x
        return mixed


def halved(x: Tensor, size: Iterable[int] | None = None) -> Tensor:
    """The mean of 2×2 pixels; an odd border is left out where `size` asks for that, else it counts by itself."""
    leaves_border_out = size is not None and [length // 2 for length in x.shape[-2:]] == list(size)
    return F.avg_pool2d(x, 2, ceil_mode=not leaves_border_out)


def _neighbour_mix(channels: int, count: int, index: int) -> Mix:
    near = _around(index, count)
    return Mix([channels] * len(range(count)[near]), channels, index - near.start, "nearest")


def _around(index: int, count: int) -> slice:
    return slice(max(index - 1, 0), min(index + 2, count))


def _convolution_norm(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels))
