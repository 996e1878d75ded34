"""Videos classified frame by frame: an image backbone, and what its features are over time."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.core.arguments import PartialShare
from paceline.core.registry import register
from paceline.models.surgery import find_heads
from paceline.models.zoo import BackboneName, LibraryArgs, build_timm, build_torchvision

Pooling = Literal["mean", "max", "statistics"]
_LEAST_VARIANCE = 1e-6


@register.model("frame_pooling")
class FramePooling(nn.Module):
    """Features of each frame by an image backbone of timm or torchvision, pooled over the frames, then linear.

    `statistics` pools into the mean and the standard deviation, by which frames that change differ from still ones. The
    backbone keeps its library's names below `backbone`.
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
        logits: Tensor = self.head(self.dropout(_pooled(features, self.pooling)))
        return logits


def _pooled(features: Tensor, pooling: Pooling) -> Tensor:
    """[N, F] of features [N, T, F], or [N, 2F] of statistics."""
    match pooling:
        case "mean":
            return features.mean(dim=1)
        case "max":
            return features.amax(dim=1)
        case "statistics":
            mean = features.mean(dim=1)
            variance = (features - mean.unsqueeze(1)).square().mean(dim=1)
            # The root of 0 has no slope: frames that are all alike would make gradients infinite.
            return torch.cat([mean, (variance + _LEAST_VARIANCE).sqrt()], dim=1)


def _build_backbone(name: str, in_channels: int, args: LibraryArgs) -> tuple[nn.Module, int]:
    library, _, member = name.partition("/")
    if library == "timm":
        model: Any = build_timm(member, 0, in_channels, args)
        return model, int(getattr(model, "head_hidden_size", None) or model.num_features)
    if library == "torchvision":
        model = build_torchvision(member, 1, in_channels, args)
        return model, _remove_head(model, name)
    raise ValueError(f"backbone {name!r}: expected timm/NAME or torchvision/NAME")


def _remove_head(model: nn.Module, name: str) -> int:
    """Take away the last linear layer and the dropout before it; the number of features that it took."""
    place = next(iter(find_heads(model)), "")
    last = model.get_submodule(place)
    num_features = getattr(last, "in_features", None)
    if num_features is None:
        raise ValueError(f"backbone {name!r} does not end with a linear layer; take timm's model of that kind")
    parent = model.get_submodule(place.rpartition(".")[0])
    siblings = list(parent.named_children())
    at = [key for key, _ in siblings].index(place.rpartition(".")[2])
    if at and isinstance(siblings[at - 1][1], nn.Dropout):
        setattr(parent, siblings[at - 1][0], nn.Identity())
    setattr(parent, siblings[at][0], nn.Identity())
    return int(num_features)
