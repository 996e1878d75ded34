"""Models of timm and torchvision by name, with random weights; each library is imported when a recipe names it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from paceline.core.registry import Library, NameOf, register
from paceline.core.torchvision_ops import import_torchvision

LibraryArgs = Mapping[str, bool | int | float | str | Sequence[int] | None]
"""Arguments that are passed to a library's model unchanged."""
BackboneName = Annotated[str, NameOf("model", "timm/", "torchvision/")]


def timm_models() -> list[str]:
    """The model names of the installed timm."""
    import_torchvision()
    import timm

    return sorted(timm.list_models())


def torchvision_models(*prefixes: str) -> list[str]:
    """The model names of the installed torchvision, or those with one of the prefixes."""
    return sorted(name for name in import_torchvision().models.list_models() if name.startswith(prefixes or ""))


@register.model("timm/", library=Library("timm", timm_models))
def build_timm(name: str, num_classes: int, in_channels: int, args: LibraryArgs | None = None) -> nn.Module:
    """A timm model; load weights with `model.weights`."""
    import_torchvision()  # timm imports it, which fails without its compiled operators
    import timm

    model: nn.Module = timm.create_model(
        name, pretrained=False, num_classes=num_classes, in_chans=in_channels, **(args or {})
    )
    return model


@register.model("torchvision/", library=Library("torchvision", torchvision_models))
def build_torchvision(name: str, num_classes: int, in_channels: int, args: LibraryArgs | None = None) -> nn.Module:
    """A torchvision model; load weights with `model.weights`."""
    torchvision = import_torchvision()
    builder = torchvision.models.get_model_builder(name)
    no_weights = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}
    model: nn.Module = builder(**no_weights, num_classes=num_classes, **(args or {}))
    if in_channels != 3:
        _replace_first_conv(model, in_channels)
    return model


def _replace_first_conv(model: nn.Module, in_channels: int) -> None:
    """Give the model, which has three input channels, a new first convolution for another number."""
    name, first = next((key, each) for key, each in model.named_modules() if isinstance(each, nn.Conv2d | nn.Conv3d))
    new = type(first)(
        in_channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]
        first.stride,  # type: ignore[arg-type]
        first.padding,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )
    model.set_submodule(name, new)


@register.model(
    "torchvision/segmentation/",
    library=Library("torchvision", partial(torchvision_models, "deeplabv3_", "fcn_", "lraspp_")),
)
def build_segmentation(
    name: str,
    num_classes: int,
    in_channels: int,
    aux: Annotated[bool, Field(description="Adds an auxiliary head, for models that have one.")] = True,
    args: LibraryArgs | None = None,
) -> nn.Module:
    """A torchvision segmentation model; load weights with `model.weights`.

    Its output is {"out": logits [N, num_classes, H, W]}, and "aux" with an auxiliary head, which LR-ASPP does not have.
    """
    if name.startswith("lraspp"):
        model: Any = build_torchvision(name, num_classes, in_channels, args)
        heads: tuple[str, ...] = ("classifier.low_classifier", "classifier.high_classifier")
    else:
        model = build_torchvision(name, num_classes, in_channels, {"aux_loss": aux, **(args or {})})
        parts = ("classifier", "aux_classifier") if aux else ("classifier",)
        heads = tuple(f"{part}.{len(model.get_submodule(part)) - 1}" for part in parts)
    # Both heads are replaced when weights have other classes.
    model.default_cfg = {"classifier": heads}
    made: nn.Module = model
    return made


_VIDEO_NAMES = partial(torchvision_models, "mc3_", "mvit_", "r2plus1d_", "r3d_", "swin3d_")


@register.model("torchvision/video/", library=Library("torchvision", _VIDEO_NAMES))
def build_video(name: str, num_classes: int, in_channels: int, args: LibraryArgs | None = None) -> nn.Module:
    """A torchvision video model; load weights with `model.weights`."""
    return build_torchvision(name, num_classes, in_channels, args)
