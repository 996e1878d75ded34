"""Keypoints by heatmaps: the simple baseline, and the place of each heatmap's maximum, between pixels.

Deconvolutions bring a backbone's coarsest map back to a quarter of the image's size (Xiao et al., "Simple Baselines for
Human Pose Estimation and Tracking", 2018). A backbone that keeps a fine map, such as HRNet, needs none.
Coordinates are continuous: a map of width w spans 0 to w, and the center of its first pixel is at 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count
from paceline.core.registry import register
from paceline.models.encoder_decoder import build_encoder
from paceline.models.zoo import BackboneName, LibraryArgs

Decode = Literal["dark", "quarter", "argmax"]
"""How a maximum is refined: by the Taylor expansion of the heatmap's logarithm (DARK), by a quarter pixel, or not."""

_BLUR = (0.0625, 0.25, 0.375, 0.25, 0.0625)  # a Gaussian of 1 pixel; it moves no peak that is one itself
_LEAST = 1e-10
_MAX_OFFSET = 1.0


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


class Poses(NamedTuple):
    """What is predicted for the person of each image."""

    heatmaps: Tensor
    """[N, J, h, w]"""
    points: Tensor
    """[N, J, 2] as x and y, in pixels of the batch's images."""
    keypoints: Tensor
    """[N, J, 2], float64, in pixels of the images as they were read, where the batch measures that way."""
    scores: Tensor
    """[N, J], the maximum of each heatmap: about 1 where the model is certain."""


def decode_heatmaps(heatmaps: Tensor, size: tuple[int, int], method: Decode) -> tuple[Tensor, Tensor]:
    """The keypoints [N, J, 2], x and y in pixels of images of that height and width, and their scores [N, J]."""
    height, width = heatmaps.shape[-2:]
    scores, flat = heatmaps.flatten(2).max(-1)
    places = torch.stack([flat % width, flat // width], -1)  # [N, J, 2] as column and row
    offsets = torch.zeros_like(places, dtype=heatmaps.dtype)
    if method != "argmax":
        around = _neighborhoods(_blurred(heatmaps) if method == "dark" else heatmaps, places)  # [N, J, 5, 5]
        offsets = _taylor_offsets(around) if method == "dark" else _quarter_offsets(around)
    scale = heatmaps.new_tensor([size[1] / width, size[0] / height])
    return (places + 0.5 + offsets) * scale, scores


def flip_heatmaps(heatmaps: Tensor, pairs: Sequence[Sequence[int]]) -> Tensor:
    """The heatmaps [N, J, h, w] of mirror images as those of the images: flipped, left and right exchanged."""
    order = list(range(heatmaps.shape[1]))
    for left, right in pairs:
        order[left], order[right] = right, left
    return heatmaps[:, order].flip(-1)


def _blurred(heatmaps: Tensor) -> Tensor:
    count, joints, height, width = heatmaps.shape
    planes = F.pad(heatmaps.reshape(count * joints, 1, height, width), (2, 2, 2, 2), mode="replicate")
    kernel = heatmaps.new_tensor(_BLUR)
    planes = F.conv2d(F.conv2d(planes, kernel.view(1, 1, 1, 5)), kernel.view(1, 1, 5, 1))
    return planes.view_as(heatmaps)


def _neighborhoods(heatmaps: Tensor, places: Tensor) -> Tensor:
    """The 5×5 pixels around each place [N, J, 2], the border repeated: [N, J, 5, 5]."""
    height, width = heatmaps.shape[-2:]
    reach = torch.arange(-2, 3, device=heatmaps.device)
    columns = (places[..., 0, None] + reach).clamp(0, width - 1)[..., None, :]
    rows = (places[..., 1, None] + reach).clamp(0, height - 1)[..., :, None]
    flat = (rows * width + columns).flatten(2)
    return heatmaps.flatten(2).gather(2, flat).view(*places.shape[:2], 5, 5)


def _quarter_offsets(around: Tensor) -> Tensor:
    """A quarter of a pixel towards the higher neighbor, along each axis."""
    across = around[..., 2, 3] - around[..., 2, 1]
    down = around[..., 3, 2] - around[..., 1, 2]
    return torch.stack([across, down], -1).sign() / 4


def _taylor_offsets(around: Tensor) -> Tensor:
    """To the maximum of the quadratic that the logarithm is near its highest pixel; 0 where that has none."""
    logs = around.clamp(min=_LEAST).log()
    dx = (logs[..., 2, 3] - logs[..., 2, 1]) / 2
    dy = (logs[..., 3, 2] - logs[..., 1, 2]) / 2
    dxx = (logs[..., 2, 4] - 2 * logs[..., 2, 2] + logs[..., 2, 0]) / 4
    dyy = (logs[..., 4, 2] - 2 * logs[..., 2, 2] + logs[..., 0, 2]) / 4
    dxy = (logs[..., 3, 3] - logs[..., 3, 1] - logs[..., 1, 3] + logs[..., 1, 1]) / 4
    determinant = dxx * dyy - dxy * dxy
    is_peak = (determinant > 0) & (dxx < 0)
    safe = torch.where(is_peak, determinant, 1.0)
    offsets = torch.stack([dxy * dy - dyy * dx, dxy * dx - dxx * dy], -1) / safe[..., None]
    return torch.where(is_peak[..., None], offsets, 0.0).clamp(-_MAX_OFFSET, _MAX_OFFSET)
