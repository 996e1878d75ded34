"""The models that recipes can name for masks and for videos."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from paceline.core.arguments import Arguments, Count, PartialShare
from paceline.core.registry import Family, register
from paceline.models.catalogue import LibraryArguments
from paceline.models.third_party import members_of, other_version_of

models = register.kind("model")

_SEGMENTATION = ("deeplabv3_", "fcn_", "lraspp_")
_VIDEO = ("mc3_", "mvit_", "r2plus1d_", "r3d_", "s3d", "swin3d_")


def _known(name: str) -> str:
    """The name of an image model of timm or torchvision, or an error that shows near ones."""
    library, _, member = name.partition("/")
    if library not in ("timm", "torchvision"):
        raise ValueError(f"expected timm/NAME or torchvision/NAME, got {name!r}")
    known = members_of(library)()
    if member.partition(".")[0] in known or other_version_of(library)():
        return name
    near = ", ".join(f"{library}/{each}" for each in get_close_matches(member, known, n=3))
    raise ValueError(f"{library} has no model {member!r}" + (f"; there is {near}" if near else ""))


BackboneName = Annotated[str, AfterValidator(_known)]
"""`timm/NAME` or `torchvision/NAME`."""
GivenArguments = dict[str, bool | int | float | str | list[int] | None]
"""Arguments that are handed to another library's model as they are."""


class UNetArguments(Arguments):
    """Arguments of `unet`."""

    backbone: BackboneName = "timm/mobilenetv2_100"
    widths: Annotated[list[Count], Field(min_length=1)] | None = None
    """Channels of each step, coarsest first; one less than the maps that the backbone gives."""
    backbone_args: GivenArguments = {}


class PyramidArguments(Arguments):
    """Arguments of `fpn`."""

    backbone: BackboneName = "timm/mobilenetv2_100"
    width: Count = 64
    backbone_args: GivenArguments = {}


class FramePoolingArguments(Arguments):
    """Arguments of `frame_pooling`."""

    backbone: BackboneName = "timm/mobilenetv2_100"
    pooling: Literal["mean", "max", "statistics"] = "mean"
    dropout: PartialShare = 0.0
    backbone_args: GivenArguments = {}


class SlowFastArguments(Arguments):
    """Arguments of `slowfast_r50`."""

    alpha: Count = 4
    """The slow pathway sees every alpha-th frame."""
    dropout: PartialShare = 0.5


class SegmentationArguments(LibraryArguments):
    """Arguments of torchvision's segmentation models."""

    aux: bool = True
    """Whether there is an auxiliary head, for models that know one."""


models.add("unet", "paceline.models.decoders:unet", UNetArguments, "U-Net on any timm or torchvision backbone")
models.add("fpn", "paceline.models.decoders:fpn", PyramidArguments, "feature pyramid on any timm or torchvision one")
models.add(
    "frame_pooling",
    "paceline.models.frame_pooling:FramePooling",
    FramePoolingArguments,
    "videos by any image backbone: features of frames, pooled over time; trains on a CPU",
)
models.add(
    "slowfast_r50",
    "paceline.models.slowfast:SlowFast",
    SlowFastArguments,
    "SlowFast for videos with ResNet-50 pathways",
)


def _of_kind(starts: tuple[str, ...]) -> list[str]:
    return [name for name in members_of("torchvision")() if name.startswith(starts)]


# Before torchvision/ itself, which may take any name where another version than the table's is installed.
models.families[:0] = [
    Family(
        prefix="torchvision/segmentation/",
        target="paceline.models.segmentation_zoo:build_segmentation",
        arguments=SegmentationArguments,
        summary="torchvision's segmentation models",
        members=lambda: _of_kind(_SEGMENTATION),
        is_open=lambda: False,
    ),
    Family(
        prefix="torchvision/video/",
        target="paceline.models.video_zoo:build_video",
        arguments=LibraryArguments,
        summary="torchvision's video classifiers",
        members=lambda: _of_kind(_VIDEO),
        is_open=lambda: False,
    ),
]
