"""The models that recipes can name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.core.arguments import Arguments, Count, PartialShare
from paceline.core.registry import Family, register
from paceline.models.third_party import members_of, other_version_of

models = register.kind("model")


class ConvNetArguments(Arguments):
    """Arguments of `convnet`."""

    widths: Annotated[list[Count], Field(min_length=1, max_length=6)] = [32, 64, 128]
    depth: Count = 1
    dropout: PartialShare = 0.0


class LibraryArguments(Arguments):
    """Arguments that are handed to another library's model as they are."""

    args: dict[str, bool | int | float | str | list[int] | None] = {}


models.add(
    "convnet",
    "paceline.models.convnet:ConvNet",
    ConvNetArguments,
    "small residual convolutional net; trains on a CPU",
)
for _name, _summary in {
    "minet_resnet50": "MINet for salient objects on a ResNet-50",
    "minet_vgg16": "MINet for salient objects on a VGG16 with BatchNorm",
    "minet_light": "MINet on a ResNet-50 with 1×1 convolutions where the others mix levels",
}.items():
    models.add(_name, f"paceline.models.minet:{_name}", summary=_summary)
for _library in ("timm", "torchvision"):
    models.families.append(
        Family(
            prefix=f"{_library}/",
            target=f"paceline.models.zoo:build_{_library}",
            arguments=LibraryArguments,
            summary=f"any model of {_library}, by its name there",
            members=members_of(_library),
            is_open=other_version_of(_library),
        )
    )
