"""Small nets of many kinds for the tests of activation checkpointing, and how their training is compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.core.torchvision_ops import import_torchvision
from paceline.models.convnet import ConvNet
from paceline.models.zoo import build_timm, build_torchvision


class DoubleConvolution(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        super().__init__(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """As users write it: no containers, features kept in a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = DoubleConvolution(3, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConvolution(4, 8))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConvolution(8, 8))
        self.up1 = DoubleConvolution(16, 8)
        self.up2 = DoubleConvolution(12, 4)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = [self.first(images)]
        features.append(self.down1(features[-1]))
        out = self.down2(features[-1])
        for up in (self.up1, self.up2):
            larger = features.pop()
            out = up(torch.cat([larger, nn.functional.interpolate(out, size=larger.shape[-2:])], 1))
        logits: Tensor = self.head(out)
        return logits


class Whole(nn.Module):
    """A net that is a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet()

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.net(images)
        return out


def flat() -> nn.Sequential:
    """A plain sequence of single layers, norm and activation in place between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 4), (4, 4), (4, 6), (6, 6), (6, 8)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.LazyLinear(3))


def transformer() -> nn.Module:
    dropping = {"drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.2}
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3}
    return build_timm("vit_tiny_patch16_224", 5, 3, {**dropping, **size})


def video() -> nn.Module:
    import_torchvision()
    from torchvision.models.video import r3d_18

    net: nn.Module = r3d_18(weights=None, num_classes=4)
    return net


def _of(library: Callable[..., nn.Module], name: str, **args: object) -> Callable[[], nn.Module]:
    return lambda: library(name, num_classes=5, in_channels=3, args=args)


NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": _of(build_torchvision, "resnet18"),
    "resnet50": _of(build_torchvision, "resnet50"),
    "timm_resnet50": _of(build_timm, "resnet50"),
    "mobilenet_v2": _of(build_torchvision, "mobilenet_v2"),
    "timm_mobilenetv2": _of(build_timm, "mobilenetv2_050"),
    "vgg16_bn": _of(build_torchvision, "vgg16_bn"),
    "timm_vgg11_bn": _of(build_timm, "vgg11_bn"),
    "vit_b_16": _of(build_torchvision, "vit_b_16"),
    "transformer": transformer,
    "convnext_tiny": _of(build_torchvision, "convnext_tiny"),
    "timm_convnext": _of(build_timm, "convnext_atto", drop_path_rate=0.2),
    "efficientnet_b0": _of(build_torchvision, "efficientnet_b0"),
    "timm_efficientnet_b0": _of(build_timm, "efficientnet_b0", drop_path_rate=0.2),
    "swin_t": _of(build_torchvision, "swin_t"),
    "densenet121": _of(build_torchvision, "densenet121"),
    "googlenet": _of(build_torchvision, "googlenet", aux_logits=False, init_weights=False),
    "r3d_18": video,
    "convnet": lambda: ConvNet(4, depth=2, dropout=0.2),
    "unet": UNet,
    "whole": Whole,
    "flat": flat,
}


def trained(net: nn.Module, images: Tensor, is_bf16: bool = False) -> dict[str, Tensor]:
    """Gradients of two passes of one step, and buffers after them."""
    torch.manual_seed(3)
    net.train()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            outputs = net(images)
        outputs.float().square().mean().backward()
    gradients = {name: each.grad for name, each in net.named_parameters() if each.grad is not None}
    return {**gradients, **dict(net.named_buffers())}


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not bit-identical."""
    return [name for name in first.keys() | second.keys() if not torch.equal(first[name], second[name])]
