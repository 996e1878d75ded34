"""Models of timm and torchvision by name; each library is imported only when a recipe names it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import NameOf
from paceline.core.registry import Library, register
from paceline.core.torchvision_ops import import_torchvision

LibraryArgs = Mapping[str, bool | int | float | str | Sequence[int] | None]
"""Arguments that are handed to another library's model as they are."""
BackboneName = Annotated[str, NameOf("model", "timm/", "torchvision/")]


def timm_models() -> list[str]:
    """The names that the installed timm has."""
    import_torchvision()
    import timm

    return sorted(timm.list_models())


def torchvision_models(*beginnings: str) -> list[str]:
    """The names that the installed torchvision has, or those that begin so."""
    return sorted(name for name in import_torchvision().models.list_models() if name.startswith(beginnings or ""))


@register.model("timm/", library=Library("timm", timm_models))
def build_timm(name: str, num_classes: int, in_channels: int, args: LibraryArgs | None = None) -> nn.Module:
    """A timm model with its own initialization; weights are never downloaded here."""
    import_torchvision()  # timm imports it, so it must come in through our door
    import timm

    model: nn.Module = timm.create_model(
        name, pretrained=False, num_classes=num_classes, in_chans=in_channels, **(args or {})
    )
    return model


@register.model("torchvision/", library=Library("torchvision", torchvision_models))
def build_torchvision(name: str, num_classes: int, in_channels: int, args: LibraryArgs | None = None) -> nn.Module:
    """A torchvision model with its own initialization; weights are never downloaded here."""
    torchvision = import_torchvision()
    builder = torchvision.models.get_model_builder(name)
    no_weights = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}
    model: nn.Module = builder(**no_weights, num_classes=num_classes, **(args or {}))
    if in_channels != 3:
        _replace_first_convolution(model, in_channels)
    return model


def _replace_first_convolution(model: nn.Module, in_channels: int) -> None:
    """Torchvision's models take three channels; another number gets a fresh first convolution of the same form."""
    place, first = next((name, each) for name, each in model.named_modules() if isinstance(each, nn.Conv2d | nn.Conv3d))
    fresh = type(first)(
        in_channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]
        first.stride,  # type: ignore[arg-type]
        first.padding,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )
    model.set_submodule(place, fresh)


_LRASPP = "lraspp"
_LRASPP_HEADS: tuple[str, ...] = ("classifier.low_classifier", "classifier.high_classifier")


@register.model(
    "torchvision/segmentation/",
    library=Library("torchvision", partial(torchvision_models, "deeplabv3_", "fcn_", "lraspp_")),
)
def build_segmentation(
    name: str,
    num_classes: int,
    in_channels: int,
    aux: Annotated[bool, Field(description="Adds an auxiliary head, for models that know one.")] = True,
    args: LibraryArgs | None = None,
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


_SHORTEST_S3D = 5  # frames; it halves their number three times, the last time without a border


_NAMES = partial(torchvision_models, "mc3_", "mvit_", "r2plus1d_", "r3d_", "s3d", "swin3d_")


@register.model("torchvision/video/", library=Library("torchvision", _NAMES))
def build_video(name: str, num_classes: int, in_channels: int, args: LibraryArgs | None = None) -> nn.Module:
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
