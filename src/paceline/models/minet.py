"""MINet for salient objects: every level of an encoder mixes with its neighbours, then a decoder sums them top-down.

Levels are counted from the finest. The names of `backbone` follow torchvision's, for files of its weights: `layer*` of
a ResNet becomes `backbone.layer*`, `conv1` and `bn1` go to `backbone.stem`; layer n of VGG's `features` has that number
in its level.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.interaction import AggregateInteraction, SelfInteraction, Unit
from paceline.models.torchvision_ops import import_torchvision

_VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_RESNET50_CHANNELS = (64, 256, 512, 1024, 2048)


class MINet(nn.Module):
    """An encoder, what joins each of its levels with the neighbours, and the decoder; see `minet_resnet50`."""

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


def minet_vgg16(num_classes: int = 1, in_channels: int = 3) -> MINet:
    """MINet on VGG16 with BatchNorm: the finest level has half of the others' channels, at full resolution."""
    channels = [widths[-1] for widths in _VGG16]
    outputs = (32, 64, 64, 64, 64)
    return MINet(VggLevels(in_channels), _aggregations(channels, outputs), outputs, nn.Identity(), num_classes)


def minet_resnet50(num_classes: int = 1, in_channels: int = 3) -> MINet:
    """MINet on ResNet-50."""
    outputs = (64,) * 5
    joints = _aggregations(_RESNET50_CHANNELS, outputs)
    return MINet(ResNetLevels(in_channels), joints, outputs, Unit(32, 32), num_classes)


def minet_light(num_classes: int = 1, in_channels: int = 3) -> MINet:
    """MINet on ResNet-50 whose levels do not mix: a 1×1 convolution brings each to 64 channels."""
    joints = [nn.Conv2d(channels, 64, 1) for channels in _RESNET50_CHANNELS]
    return MINet(ResNetLevels(in_channels), joints, (64,) * 5, Unit(32, 32), num_classes)


def _aggregations(channels: Sequence[int], outputs: Sequence[int]) -> list[AggregateInteraction]:
    """One for each level, over the level and its neighbours."""
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
