"""Video classification with an image backbone: features of frames, pooled over time."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.core.arguments import PartialShare
from paceline.core.registry import register
from paceline.models.surgery import find_heads
from paceline.models.zoo import BackboneName, LibraryArgs, build_timm, build_torchvision

Pooling = Literal["mean", "max", "statistics"]
_EPSILON = 1e-6


@register.model("frame_pooling")
class FramePooling(nn.Module):
    """Features of each frame from an image backbone of timm or torchvision, pooled over frames, then linear.

    `statistics` pools into mean and standard deviation, which tells motion from still frames.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        backbone: BackboneName = "timm/mobilenetv2_100",
        pooling: Pooling = "mean",
        dropout: PartialShare = 0.0,
        backbone_args: LibraryArgs | None = None,
    ) -> None:
        super().__init__()
        self.backbone, num_features = _build_backbone(backbone, in_channels, backbone_args or {})
        self.pooling = pooling
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(num_features * (2 if pooling == "statistics" else 1), num_classes)

    def forward(self, clips: Tensor) -> Tensor:
        """Logits [N, num_classes] of clips [N, in_channels, T, H, W]."""
        frames = clips.transpose(1, 2)  # [N, T, C, H, W]
        features = self.backbone(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])  # [N, T, F]
        logits: Tensor = self.head(self.dropout(_pool(features, self.pooling)))
        return logits


def _pool(features: Tensor, pooling: Pooling) -> Tensor:
    """[N, F] of features [N, T, F], or [N, 2F] of statistics."""
    match pooling:
        case "mean":
            return features.mean(dim=1)
        case "max":
            return features.amax(dim=1)
        case "statistics":
            mean = features.mean(dim=1)
            variance = (features - mean.unsqueeze(1)).square().mean(dim=1)
            # Equal frames have variance 0, where the gradient of the root is infinite.
            return torch.cat([mean, (variance + _EPSILON).sqrt()], dim=1)


def _build_backbone(name: str, in_channels: int, args: LibraryArgs) -> tuple[nn.Module, int]:
    library, _, member = name.partition("/")
    if library == "timm":
        model: Any = build_timm(member, 0, in_channels, args)
        return model, int(getattr(model, "head_hidden_size", None) or model.num_features)
    model = build_torchvision(member, 1, in_channels, args)
    return model, _remove_head(model, name)


def _remove_head(model: nn.Module, name: str) -> int:
    """Remove the last linear layer and the dropout before it; returns its number of input features."""
    head = next(iter(find_heads(model)), "")
    num_features = getattr(model.get_submodule(head), "in_features", None)
    if num_features is None:
        raise ValueError(f"backbone {name!r} does not end with a linear layer; use timm's model of that architecture")
    parent_name, _, key = head.rpartition(".")
    parent = model.get_submodule(parent_name)
    keys = [each for each, _ in parent.named_children()]
    before = keys[: keys.index(key)][-1:]
    for each in [*(one for one in before if isinstance(parent.get_submodule(one), nn.Dropout)), key]:
        parent.set_submodule(each, nn.Identity())
    return int(num_features)
