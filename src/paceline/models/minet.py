"""MINet for salient object detection: aggregate and self-interaction modules on VGG16 or ResNet-50."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.registry import register
from paceline.core.torchvision_ops import import_torchvision
from paceline.models.convnet import ConvBNReLU

_VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_RESNET50_CHANNELS = (64, 256, 512, 1024, 2048)


class MINet(nn.Module):
    """A backbone, a lateral module for each of its levels, and a top-down decoder."""

    _no_split_modules = ("AggregateInteraction", "DecoderLevel")

    def __init__(
        self,
        backbone: nn.Module,
        laterals: Sequence[nn.Module],
        widths: Sequence[int],
        fuse: nn.Module,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.laterals = nn.ModuleList(laterals)
        # A level ends with the channels of the next finer one, the finest with 32.
        outputs = (32, *widths[:-1])
        self.decoder = nn.ModuleList(DecoderLevel(*each) for each in zip(widths, outputs, strict=True))
        self.fuse = fuse
        self.head = nn.Conv2d(32, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, num_classes, H, W] of images [N, in_channels, H, W]."""
        levels = self.backbone(images)
        result: Tensor | None = None
        for index in reversed(range(len(levels))):
            own = self._lateral(index, levels)  # [N, widths[index], h, w]
            result = self.decoder[index](own if result is None else own + _resize(result, own))
        assert result is not None
        logits: Tensor = self.head(self.fuse(_resize(result, images)))
        return logits

    def _lateral(self, index: int, levels: list[Tensor]) -> Tensor:
        lateral = self.laterals[index]
        if isinstance(lateral, AggregateInteraction):
            own: Tensor = lateral(*levels[max(index - 1, 0) : index + 2])
        else:
            own = lateral(levels[index])
        return own


class DecoderLevel(nn.Sequential):
    """Self-interaction, then a convolution."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__(SelfInteraction(channels, channels // 2), ConvBNReLU(channels, out_channels))


class ResNet50Encoder(nn.Module):
    """ResNet-50 without its classifier: the stem before pooling, then the four stages, at strides 2 to 32."""

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
        levels: list[Tensor] = [self.stem(images)]
        features = self.pool(levels[0])
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            features = stage(features)
            levels.append(features)
        return levels


class VGG16Encoder(nn.Module):
    """VGG16 with BatchNorm and without its classifier, at strides 1 to 16; pooling opens a level."""

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.levels = nn.ModuleList()
        channels, number = in_channels, 0
        for widths in _VGG16:
            layers: list[nn.Module] = [nn.MaxPool2d(2)] if number else []
            for width in widths:
                layers += [_conv(channels, width), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
            named = OrderedDict((str(number + index), layer) for index, layer in enumerate(layers))
            self.levels.append(nn.Sequential(named))
            number += len(layers)

    def forward(self, images: Tensor) -> list[Tensor]:
        levels = []
        features = images
        for level in self.levels:
            features = level(features)
            levels.append(features)
        return levels


@register.model("minet_vgg16")
def minet_vgg16(num_classes: int = 1, in_channels: int = 3) -> MINet:
    """MINet on VGG16 with BatchNorm; the finest level, at full resolution, has half of the others' channels."""
    channels = [widths[-1] for widths in _VGG16]
    outputs = (32, 64, 64, 64, 64)
    return MINet(VGG16Encoder(in_channels), _aggregations(channels, outputs), outputs, nn.Identity(), num_classes)


@register.model("minet_resnet50")
def minet_resnet50(num_classes: int = 1, in_channels: int = 3) -> MINet:
    """MINet on ResNet-50."""
    outputs = (64,) * 5
    laterals = _aggregations(_RESNET50_CHANNELS, outputs)
    return MINet(ResNet50Encoder(in_channels), laterals, outputs, ConvBNReLU(32, 32), num_classes)


@register.model("minet_light")
def minet_light(num_classes: int = 1, in_channels: int = 3) -> MINet:
    """MINet on ResNet-50 without aggregate interaction: a 1×1 convolution reduces each level to 64 channels."""
    laterals = [nn.Conv2d(channels, 64, 1) for channels in _RESNET50_CHANNELS]
    return MINet(ResNet50Encoder(in_channels), laterals, (64,) * 5, ConvBNReLU(32, 32), num_classes)


def _aggregations(channels: Sequence[int], outputs: Sequence[int]) -> list[AggregateInteraction]:
    """One for each level, over the level and its neighbors."""
    return [
        AggregateInteraction(channels[max(index - 1, 0) : index + 2], min(index, 1), outputs[index])
        for index in range(len(channels))
    ]


def _conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv


def _resize(features: Tensor, like: Tensor) -> Tensor:
    if features.shape[-2:] == like.shape[-2:]:
        return features
    return F.interpolate(features, size=like.shape[-2:], mode="bilinear", align_corners=False)


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
                summed = summed + convolution(downsample(each, own.shape[-2:]))
            elif index > self.own:
                summed = summed + convolution(F.interpolate(each, size=own.shape[-2:], mode=self.up))
        return F.relu(self.norm(summed), inplace=True)


class AggregateInteraction(nn.Module):
    """AIM: a level of the encoder mixed with its neighbors; `own` is its position among the two or three inputs."""

    def __init__(self, in_channels: Sequence[int], own: int, out_channels: int) -> None:
        super().__init__()
        mid = min(in_channels)
        count = len(in_channels)
        self.own = own
        self.enter = nn.ModuleList(_conv_bn(channels, mid) for channels in in_channels)
        self.interaction = nn.ModuleList(_neighbor_mix(mid, count, index) for index in range(count))
        self.fuse = Mix([mid] * count, mid, own, "nearest")
        self.leave = _conv_bn(mid, out_channels)
        self.shortcut = nn.Conv2d(in_channels[own], out_channels, 1)

    def forward(self, *levels: Tensor) -> Tensor:
        """[N, out_channels, h, w] of neighboring levels [N, in_channels[i], h_i, w_i], finest first."""
        branches = [F.relu(enter(level), inplace=True) for enter, level in zip(self.enter, levels, strict=True)]
        branches = [mix(branches[_neighbors(index, len(branches))]) for index, mix in enumerate(self.interaction)]
        mixed = self.leave(self.fuse(branches))
        return F.relu(mixed + self.shortcut(levels[self.own]), inplace=True)


class SelfInteraction(nn.Module):
    """SIM: features mixed with themselves at half the resolution; the shape stays."""

    def __init__(self, full_channels: int, half_channels: int) -> None:
        super().__init__()
        both = (full_channels, half_channels)
        self.enter = nn.ModuleList(_conv_bn(full_channels, channels) for channels in both)
        self.interaction = nn.ModuleList(Mix(both, channels, own, "bilinear") for own, channels in enumerate(both))
        self.fuse = Mix(both, full_channels, 0, "bilinear")

    def forward(self, x: Tensor) -> Tensor:
        """[N, full_channels, H, W] to the same shape."""
        inputs = (x, downsample(x))
        branches = [F.relu(enter(each), inplace=True) for enter, each in zip(self.enter, inputs, strict=True)]
        branches = [mix(branches) for mix in self.interaction]
        mixed: Tensor = self.fuse(branches) + x
        return mixed


def downsample(x: Tensor, size: Iterable[int] | None = None) -> Tensor:
    """The mean of 2×2 pixels; an odd border is dropped if `size` is rounded down, otherwise averaged by itself."""
    is_rounded_down = size is not None and [length // 2 for length in x.shape[-2:]] == list(size)
    return F.avg_pool2d(x, 2, ceil_mode=not is_rounded_down)


def _neighbor_mix(channels: int, count: int, index: int) -> Mix:
    neighbors = _neighbors(index, count)
    return Mix([channels] * len(range(count)[neighbors]), channels, index - neighbors.start, "nearest")


def _neighbors(index: int, count: int) -> slice:
    return slice(max(index - 1, 0), min(index + 2, count))


def _conv_bn(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels))
