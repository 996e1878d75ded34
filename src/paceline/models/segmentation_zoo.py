"""Torchvision's segmentation models by name; the library is imported only when a recipe names one."""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.models.zoo import build_torchvision

_LRASPP = "lraspp"
_LRASPP_HEADS: tuple[str, ...] = ("classifier.low_classifier", "classifier.high_classifier")


def build_segmentation(
    name: str, num_classes: int, in_channels: int, aux: bool = True, args: dict[str, Any] | None = None
) -> nn.Module:
    """A model that gives {"out": logits [N, num_classes, H, W]}, and "aux" likewise if it has an auxiliary head.

    LR-ASPP has none. Weights are never downloaded here; the names of parameters are torchvision's.
    """
    if name.startswith(_LRASPP):
        model: Any = build_torchvision(name, num_classes, in_channels, args or {})
        heads = _LRASPP_HEADS
    else:
        model = build_torchvision(name, num_classes, in_channels, {"aux_loss": aux, **(args or {})})
        parts = ("classifier", "aux_classifier") if aux else ("classifier",)
        heads = tuple(f"{part}.{len(model.get_submodule(part)) - 1}" for part in parts)
    # Both heads are replaced when published weights have other classes.
    model.default_cfg = {"classifier": heads}
    made: nn.Module = model
    return made
