"""The data sets and transforms that recipes can name."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from paceline.core.arguments import Arguments, Count, CountOrZero, PartialShare
from paceline.core.registry import register
from paceline.data.argument_types import Name

datasets = register.kind("dataset")


def _together_one(shares: dict[str, float]) -> dict[str, float]:
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"the shares of all parts must be 1 together, got {sum(shares.values()):g}")
    return shares


def _different(names: list[str]) -> list[str]:
    again = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if again is not None:
        raise ValueError(f"each name once, got {again!r} again")
    return names


Extensions = Annotated[list[Annotated[str, Field(pattern=r"^\.")]], Field(min_length=1)]
ClassNames = Annotated[list[Name], Field(min_length=1), AfterValidator(_different)]
Shares = Annotated[dict[Name, Annotated[PartialShare, Field(gt=0)]], Field(min_length=2), AfterValidator(_together_one)]


class SplitArguments(Arguments):
    """How data sets without splits of their own are split: by chance, into parts with names."""

    split: Name | None = None
    split_shares: Shares | None = None
    split_seed: CountOrZero = 0

    @model_validator(mode="after")
    def _split_is_a_part(self) -> Self:
        if self.split_shares is not None and self.split not in self.split_shares:
            raise ValueError(f"split must be one of split_shares ({', '.join(self.split_shares)}), got {self.split}")
        return self


class DrawnSplitArguments(SplitArguments):
    """The same where a split can be nothing else."""

    @model_validator(mode="after")
    def _split_is_drawn(self) -> Self:
        if self.split is not None and self.split_shares is None:
            raise ValueError("split needs split_shares, such as {train: 0.8, val: 0.2}; lists are named by their file")
        return self


class IdxArguments(Arguments):
    """Arguments of `idx`."""

    root: Name
    split: Literal["train", "test"]
    classes: Annotated[list[Name], Field(min_length=1)] | None = None


class ImageFolderArguments(SplitArguments):
    """Arguments of `image_folder`."""

    root: Name
    extensions: Extensions | None = None
    min_size: Count | None = None
    follow_links: bool = False
    max_pixels: Count = 100_000_000


class FashionSmallArguments(Arguments):
    """Arguments of `fashion_small`."""

    split: Literal["train", "test"]


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
