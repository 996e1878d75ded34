"""Torchvision's video classifiers by name, fitted to the classes and channels of the data."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.zoo import build_torchvision

_SHORTEST_S3D = 5  # frames; it halves their number three times, the last time without a border


def build_video(name: str, num_classes: int, in_channels: int, args: dict[str, Any]) -> nn.Module:
    """A model from clips [N, in_channels, T, H, W] to logits [N, num_classes]; weights are never downloaded here."""
    model: Any = build_torchvision(name, num_classes, 3, args)
    if in_channels != 3:
        _replace_first_convolution(model, in_channels)
    if name == "s3d":
        model.avgpool = WindowMean()
        model.register_forward_pre_hook(_refuse_short_clips)
    if name.startswith("mvit"):
        model.register_forward_pre_hook(_refuse_other_sizes)
    made: nn.Module = model
    return made


class WindowMean(nn.Module):
    """Means over all windows of 2 frames and 7×7 pixels, or over what there is where a clip is smaller.

    Torchvision's layer fails on such clips; its backward pass is not deterministic on a GPU, this one's is.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, T - 1, H - 6, W - 6], each at least 1, of [N, C, T, H, W]."""
        height, width = x.shape[-2:]
        means = F.avg_pool2d(x.flatten(1, 2), (min(7, height), min(7, width)), stride=1)
        means = means.reshape(*x.shape[:3], *means.shape[2:])
        return means if x.shape[2] == 1 else (means[:, :, :-1] + means[:, :, 1:]) / 2


def _refuse_short_clips(model: Any, inputs: tuple[Tensor, ...]) -> None:
    if inputs[0].shape[2] < _SHORTEST_S3D:
        raise ValueError(
            f"the model takes clips of at least {_SHORTEST_S3D} frames, the data has {inputs[0].shape[2]};"
            " ask for longer clips, or take another model"
        )


def _refuse_other_sizes(model: Any, inputs: tuple[Tensor, ...]) -> None:
    """An MViT knows positions for one size only; its own error would be about sizes of matrices."""
    places = model.pos_encoding
    per_clip = (places.temporal_size, *places.spatial_size)
    expected = [count * stride for count, stride in zip(per_clip, model.conv_proj.stride, strict=True)]
    found = list(inputs[0].shape[2:])
    if found != expected:
        frames, height, width = expected
        raise ValueError(
            f"the model takes clips of {frames} frames of {height}×{width} pixels, the data has {found[0]} frames"
            f" of {found[1]}×{found[2]}; change the transforms and the clip's length, or take another model"
        )


def _replace_first_convolution(model: nn.Module, in_channels: int) -> None:
    place, first = next((name, each) for name, each in model.named_modules() if isinstance(each, nn.Conv3d))
    fresh = nn.Conv3d(
        in_channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]
        first.stride,  # type: ignore[arg-type]
        first.padding,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )
    model.set_submodule(place, fresh)
