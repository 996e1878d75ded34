"""MINet for salient objects: every encoder level aggregates its neighbors, a decoder sums them top-down."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.registry import register
from paceline.core.torchvision_ops import import_torchvision

_VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_RESNET50_CHANNELS = (64, 256, 512, 1024, 2048)


class MINet(nn.Module):
    """An encoder, what joins each of its levels with the neighbors, and the decoder; see `minet_resnet50`."""

    _no_split_modules = ("AggregateInteraction", "DecoderLevel")

    def __init__(
        self,
        backbone: nn.Module,
        joints: Sequence[nn.Module],
        widths: Sequence[int],
        finish: nn.Module,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.joints = nn.ModuleList(joints)
        # A level ends with the channels of the next finer one, the finest with 32.
        outputs = (32, *widths[:-1])
        self.decoder = nn.ModuleList(DecoderLevel(*each) for each in zip(widths, outputs, strict=True))
        self.finish = finish
        self.head = nn.Conv2d(32, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, num_classes, H, W] of images [N, in_channels, H, W]."""
        levels = self.backbone(images)
        result: Tensor | None = None
        for index in reversed(range(len(levels))):
            joined = self._joined(index, levels)  # [N, widths[index], h, w]
            result = self.decoder[index](joined if result is None else joined + _resized(result, joined))
        assert result is not None
        logits: Tensor = self.head(self.finish(_resized(result, images)))
        return logits

    def _joined(self, index: int, levels: list[Tensor]) -> Tensor:
        joint = self.joints[index]
        if isinstance(joint, AggregateInteraction):
            joined: Tensor = joint(*levels[max(index - 1, 0) : index + 2])
        else:
            joined = joint(levels[index])
        return joined


class DecoderLevel(nn.Sequential):
    """Lets a level of the decoder interact with itself, then ends it with a convolution."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__(SelfInteraction(channels, channels // 2), Unit(channels, out_channels))


class ResNetLevels(nn.Module):
    """ResNet-50 without its classifier: the stem before its pooling, then the four stages, at strides 2 to 32."""

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        import_torchvision()
        from torchvision.models import resnet50

        whole: Any = resnet50(weights=None, num_classes=1)
        if in_channels != 3:
            whole.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.stem = nn.Sequential(OrderedDict(conv1=whole.conv1, bn1=whole.bn1, relu=whole.relu))
        self.pool = whole.maxpool
        self.layer1, self.layer2, self.layer3, self.layer4 = whole.layer1, whole.layer2, whole.layer3, whole.layer4

    def forward(self, images: Tensor) -> list[Tensor]:
        """The five levels, finest first."""
        levels: list[Tensor] = [self.stem(images)]
        features = self.pool(levels[0])
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            features = stage(features)
            levels.append(features)
        return levels


class VggLevels(nn.Module):
    """VGG16 with BatchNorm and without its classifier, at strides 1 to 16; pooling opens a level."""

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.levels = nn.ModuleList()
        channels, number = in_channels, 0
        for widths in _VGG16:
            layers: list[nn.Module] = [nn.MaxPool2d(2)] if number else []
            for width in widths:
                layers += [_convolution(channels, width), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
            named = OrderedDict((str(number + index), layer) for index, layer in enumerate(layers))
            self.levels.append(nn.Sequential(named))
            number += len(layers)

    def forward(self, images: Tensor) -> list[Tensor]:
        """The five levels, finest first."""
        found = []
        features = images
        for level in self.levels:
            features = level(features)
            found.append(features)
        return found


@register.model("minet_vgg16")
def minet_vgg16(num_classes: int = 1, in_channels: int = 3) -> MINet:
    """MINet on VGG16 with BatchNorm: the finest level has half of the others' channels, at full resolution."""
    channels = [widths[-1] for widths in _VGG16]
    outputs = (32, 64, 64, 64, 64)
    return MINet(VggLevels(in_channels), _aggregations(channels, outputs), outputs, nn.Identity(), num_classes)


@register.model("minet_resnet50")
def minet_resnet50(num_classes: int = 1, in_channels: int = 3) -> MINet:
    """MINet on ResNet-50."""
    outputs = (64,) * 5
    joints = _aggregations(_RESNET50_CHANNELS, outputs)
    return MINet(ResNetLevels(in_channels), joints, outputs, Unit(32, 32), num_classes)


@register.model("minet_light")
def minet_light(num_classes: int = 1, in_channels: int = 3) -> MINet:
    """MINet on ResNet-50 whose levels do not mix: a 1×1 convolution brings each to 64 channels."""
    joints = [nn.Conv2d(channels, 64, 1) for channels in _RESNET50_CHANNELS]
    return MINet(ResNetLevels(in_channels), joints, (64,) * 5, Unit(32, 32), num_classes)


def _aggregations(channels: Sequence[int], outputs: Sequence[int]) -> list[AggregateInteraction]:
    """One for each level, over the level and its neighbors."""
    return [
        AggregateInteraction(channels[max(index - 1, 0) : index + 2], min(index, 1), outputs[index])
        for index in range(len(channels))
    ]


def _convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    made = nn.Conv2d(in_channels, out_channels, 3, padding=1)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    assert made.bias is not None
    nn.init.zeros_(made.bias)
    return made


def _resized(features: Tensor, like: Tensor) -> Tensor:
    if features.shape[-2:] == like.shape[-2:]:
        return features
    return F.interpolate(features, size=like.shape[-2:], mode="bilinear", align_corners=False)


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
    """Mixes a level of an encoder with its neighbors; `own` is its place among the two or three inputs."""

    def __init__(self, in_channels: Sequence[int], own: int, out_channels: int) -> None:
        super().__init__()
        mid = min(in_channels)
        count = len(in_channels)
        self.own = own
        self.enter = nn.ModuleList(_convolution_norm(channels, mid) for channels in in_channels)
        self.exchange = nn.ModuleList(_neighbor_mix(mid, count, index) for index in range(count))
        self.fuse = Mix([mid] * count, mid, own, "nearest")
        self.leave = _convolution_norm(mid, out_channels)
        self.shortcut = nn.Conv2d(in_channels[own], out_channels, 1)

    def forward(self, *levels: Tensor) -> Tensor:
        """[N, out_channels, h, w] of neighboring levels [N, in_channels[i], h_i, w_i], finest first."""
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


def _neighbor_mix(channels: int, count: int, index: int) -> Mix:
    near = _around(index, count)
    return Mix([channels] * len(range(count)[near]), channels, index - near.start, "nearest")


def _around(index: int, count: int) -> slice:
    return slice(max(index - 1, 0), min(index + 2, count))


def _convolution_norm(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels))
