"""The data sets and transforms that recipes can name."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from paceline.core.arguments import Arguments, Count, Positive, Share
from paceline.core.registry import register

datasets = register.kind("dataset")
transforms = register.kind("transform")


def _in_order(bounds: list[float]) -> list[float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the lower bound comes first, got {bounds}")
    return bounds


Size = Count | Annotated[list[Count], Field(min_length=2, max_length=2)]
"""One number, or height and width."""
ShareRange = Annotated[
    list[Annotated[Share, Field(gt=0)]], Field(min_length=2, max_length=2), AfterValidator(_in_order)
]
PositiveRange = Annotated[list[Positive], Field(min_length=2, max_length=2), AfterValidator(_in_order)]
Name = Annotated[str, Field(min_length=1)]


class IdxArguments(Arguments):
    """Arguments of `idx`."""

    root: Name
    split: Literal["train", "test"]
    classes: Annotated[list[Name], Field(min_length=1)] | None = None


class ImageFolderArguments(Arguments):
    """Arguments of `image_folder`."""

    root: Name
    split: Name | None = None
    extensions: Annotated[list[Annotated[str, Field(pattern=r"^\.")]], Field(min_length=1)] | None = None
    min_size: Count | None = None
    follow_links: bool = False
    max_pixels: Count = 100_000_000


class FashionSmallArguments(Arguments):
    """Arguments of `fashion_small`."""

    split: Literal["train", "test"]


class SizeArguments(Arguments):
    """Arguments of `resize` and `center_crop`."""

    size: Size


class RandomResizedCropArguments(Arguments):
    """Arguments of `random_resized_crop`."""

    size: Size
    area: ShareRange = [0.08, 1.0]
    aspect: PositiveRange = [3 / 4, 4 / 3]


class FlipArguments(Arguments):
    """Arguments of `flip`."""

    chance: Share = 0.5


class RandomCropArguments(Arguments):
    """Arguments of `random_crop`."""

    padding: Count


class RandomErasingArguments(Arguments):
    """Arguments of `random_erasing`."""

    chance: Share
    area: ShareRange = [0.02, 0.33]
    aspect: PositiveRange = [0.3, 3.3]
    value: float = 0.0


class NormalizeArguments(Arguments):
    """Arguments of `normalize`."""

    mean: Annotated[list[float], Field(min_length=1)]
    std: Annotated[list[Positive], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_std_for_each_mean(self) -> Self:
        if len(self.mean) != len(self.std):
            raise ValueError(f"one std for each mean, got {len(self.mean)} means and {len(self.std)} stds")
        return self


datasets.add(
    "idx",
    "paceline.data.datasets.idx:idx",
    IdxArguments,
    "images and labels of the MNIST family, in IDX files",
)
datasets.add(
    "image_folder",
    "paceline.data.datasets.image_folder:ImageFolder",
    ImageFolderArguments,
    "image files, a folder a class",
)
datasets.add(
    "fashion_small",
    "paceline.data.datasets.embedded:fashion_small",
    FashionSmallArguments,
    "a part of Fashion-MNIST that comes with the package",
)

transforms.add(
    "resize",
    "paceline.data.sample_transforms:Resize",
    SizeArguments,
    "resize to a short side, or to height and width",
)
transforms.add("center_crop", "paceline.data.sample_transforms:CenterCrop", SizeArguments, "cut out the middle")
transforms.add(
    "random_resized_crop",
    "paceline.data.sample_transforms:RandomResizedCrop",
    RandomResizedCropArguments,
    "cut out a random part and resize it",
)
transforms.add("flip", "paceline.data.batch_transforms:Flip", FlipArguments, "mirror left and right, by chance")
transforms.add(
    "random_crop",
    "paceline.data.batch_transforms:RandomCrop",
    RandomCropArguments,
    "pad with zeros and cut out again at random",
)
transforms.add(
    "random_erasing",
    "paceline.data.batch_transforms:RandomErasing",
    RandomErasingArguments,
    "paint over a random rectangle, by chance",
)
transforms.add(
    "normalize",
    "paceline.data.batch_transforms:Normalize",
    NormalizeArguments,
    "(pixel / 255 − mean) / std, by channel",
)
