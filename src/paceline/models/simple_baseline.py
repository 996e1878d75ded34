"""Simple baseline: heatmaps of keypoints from any image backbone of timm or torchvision.

Deconvolutions bring a backbone's coarsest map back to a quarter of the image's size (Xiao et al., "Simple Baselines for
Human Pose Estimation and Tracking", 2018). A backbone that keeps a fine map, such as HRNet, needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count
from paceline.core.registry import register
from paceline.models.encoder_decoder import build_encoder
from paceline.models.zoo import BackboneName, LibraryArgs


@register.model("simple_baseline")
class SimpleBaseline(nn.Module):
    """A heatmap of each keypoint: a timm or torchvision backbone, deconvolutions, and a 1×1 convolution."""

    def __init__(
        self,
        num_keypoints: int,
        in_channels: int = 3,
        backbone: BackboneName = "timm/resnet50",
        widths: Annotated[
            Sequence[Count], Field(description="Channels of each deconvolution, which doubles the height and width.")
        ] = (256, 256, 256),
        feature_stride: Annotated[
            Count | None, Field(description="The stride of the backbone's map that is used; null for the coarsest.")
        ] = None,
        backbone_args: LibraryArgs | None = None,
    ) -> None:
        super().__init__()
        if num_keypoints < 1:
            raise ValueError("simple_baseline: the data has no keypoints; use a data set with keypoints")
        self.backbone, channels, strides = build_encoder(backbone, in_channels, backbone_args or {})
        stride = feature_stride or strides[-1]
        if stride not in strides:
            found = ", ".join(map(str, strides))
            raise ValueError(f"feature_stride {stride}: {backbone} has maps of the strides {found}")
        self._level = strides.index(stride)
        sizes = [channels[self._level], *widths]
        self.deconvolutions = nn.Sequential(*map(_deconvolution, sizes[:-1], sizes[1:]))
        self.head = nn.Conv2d(sizes[-1], num_keypoints, 1)
        nn.init.normal_(self.head.weight, std=0.001)
        nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """Heatmaps [N, num_keypoints, h, w] of images [N, in_channels, H, W]."""
        features = self.backbone(images)[self._level]  # [N, C, H / stride, W / stride]
        heatmaps: Tensor = self.head(self.deconvolutions(features))
        return heatmaps


def _deconvolution(in_channels: int, out_channels: int) -> nn.Sequential:
    deconvolution = nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1, bias=False)
    nn.init.normal_(deconvolution.weight, std=0.001)
    return nn.Sequential(deconvolution, nn.BatchNorm2d(out_channels), nn.ReLU())
