"""The transforms of single samples that recipes can name: those that move pixels, boxes and keypoints."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from paceline.core.arguments import Arguments, Count, Positive, Share
from paceline.core.registry import register
from paceline.data.argument_types import Fill, PixelValue, PositiveRange, ShareRange, Size

transforms = register.kind("transform")

Degrees = Annotated[float, Field(ge=0, le=180)]


def _at_least_one(bounds: list[float]) -> list[float]:
    if bounds[0] < 1:
        raise ValueError(f"a canvas is not smaller than its image, so both bounds are 1 or more, got {bounds}")
    return bounds


class ResizeArguments(Arguments):
    """Arguments of `resize`."""

    size: Size
    side: Literal["shorter", "longer"] | None = None


class RandomResizeArguments(Arguments):
    """Arguments of `random_resize`."""

    sides: Annotated[list[Count], Field(min_length=2, max_length=2)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.sides[0] > self.sides[1]:
            raise ValueError(f"the shorter length comes first, got {self.sides}")
        return self


class PadArguments(Arguments):
    """Arguments of `pad`."""

    size: Size | None = None
    multiple: Count | None = None
    fill: Fill = 0
    mask_fill: PixelValue = 0

    @model_validator(mode="after")
    def _one_goal(self) -> Self:
        if (self.size is None) == (self.multiple is None):
            raise ValueError("give either size or multiple")
        return self


class CropArguments(Arguments):
    """Arguments of `center_crop` and `random_fixed_crop`."""

    size: Size
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1


class RandomResizedCropArguments(Arguments):
    """Arguments of `random_resized_crop`."""

    size: Size
    area: ShareRange = [0.08, 1.0]
    aspect: PositiveRange = [3 / 4, 4 / 3]
    min_visible: Share = 0.1


class MirrorArguments(Arguments):
    """Arguments of `mirror`."""

    chance: Share = 0.5


class RandomRotationArguments(Arguments):
    """Arguments of `random_rotation`."""

    degrees: Degrees
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1


class RandomAffineArguments(Arguments):
    """Arguments of `random_affine`."""

    degrees: Degrees = 0.0
    scale: PositiveRange = [1.0, 1.0]
    translate: Share = 0.0
    shear: Annotated[float, Field(ge=0, le=80)] = 0.0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1


class PoseCropArguments(Arguments):
    """Arguments of `pose_crop`."""

    size: Annotated[list[Count], Field(min_length=2, max_length=2)]
    margin: Positive = 1.25
    scale: PositiveRange = [1.0, 1.0]
    degrees: Degrees = 0.0
    fill: Fill = 0
    mask_fill: PixelValue = 0


class ExpandArguments(Arguments):
    """Arguments of `expand`."""

    chance: Share = 0.5
    ratio: Annotated[PositiveRange, AfterValidator(_at_least_one)] = [1.0, 4.0]
    fill: Fill = 0
    mask_fill: PixelValue = 0


class RandomIouCropArguments(Arguments):
    """Arguments of `random_iou_crop`."""

    overlaps: Annotated[list[Share], Field(min_length=1)] = [0.0, 0.1, 0.3, 0.5, 0.7, 0.9]
    sides: ShareRange = [0.3, 1.0]
    aspect: PositiveRange = [0.5, 2.0]


transforms.add(
    "resize",
    "paceline.data.transforms.sample_transforms:Resize",
    ResizeArguments,
    "resize to a short or a long side, or to height and width",
)
transforms.add(
    "random_resize",
    "paceline.data.transforms.sample_transforms:RandomResize",
    RandomResizeArguments,
    "resize to a short side that is drawn",
)
transforms.add(
    "pad",
    "paceline.data.transforms.sample_transforms:Pad",
    PadArguments,
    "add to the right and below, up to a size or a multiple",
)
transforms.add(
    "center_crop", "paceline.data.transforms.sample_transforms:CenterCrop", CropArguments, "cut out the middle"
)
transforms.add(
    "random_fixed_crop",
    "paceline.data.transforms.sample_transforms:RandomFixedCrop",
    CropArguments,
    "cut out a part of one size at a random place",
)
transforms.add(
    "random_resized_crop",
    "paceline.data.transforms.sample_transforms:RandomResizedCrop",
    RandomResizedCropArguments,
    "cut out a random part and resize it",
)
transforms.add(
    "mirror",
    "paceline.data.transforms.sample_transforms:Mirror",
    MirrorArguments,
    "exchange left and right, by chance, one sample at a time",
)
transforms.add(
    "random_rotation",
    "paceline.data.transforms.affine:RandomRotation",
    RandomRotationArguments,
    "turn by a random angle",
)
transforms.add(
    "random_affine",
    "paceline.data.transforms.affine:RandomAffine",
    RandomAffineArguments,
    "turn, scale, shift and shear at random",
)
transforms.add(
    "pose_crop",
    "paceline.data.transforms.affine:PoseCrop",
    PoseCropArguments,
    "bring the first object to a fixed size, perhaps scaled and turned",
)
transforms.add(
    "expand",
    "paceline.data.transforms.object_crops:Expand",
    ExpandArguments,
    "lay the image on a larger canvas, by chance",
)
transforms.add(
    "random_iou_crop",
    "paceline.data.transforms.object_crops:RandomIouCrop",
    RandomIouCropArguments,
    "cut out a part that overlaps an object enough",
)
