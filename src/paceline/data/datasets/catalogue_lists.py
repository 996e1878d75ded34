"""The data sets of list files and of images with masks that recipes can name."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.core.arguments import Count, CountOrZero
from paceline.core.registry import register
from paceline.data.argument_types import Name
from paceline.data.catalogue import ClassNames, DrawnSplitArguments, Extensions

datasets = register.kind("dataset")

Column = Name | CountOrZero
"""A column by name, or by number from 0."""


class ListFileArguments(DrawnSplitArguments):
    """Arguments of `list_file`."""

    file: Name
    root: Name | None = None
    format: Literal["csv", "tsv", "jsonl", "txt"] | None = None
    image: Column | None = None
    label: Column | None = None
    label_separator: Name | None = None
    classes: ClassNames | None = None
    follow_links: bool = False
    max_pixels: Count = 100_000_000


class ImageMaskArguments(DrawnSplitArguments):
    """Arguments of `image_mask`."""

    root: Name
    images: Name = "images"
    masks: Name = "masks"
    list_file: Name | None = None
    classes: Annotated[ClassNames, Field(max_length=256)] | None = None
    ignore_index: Annotated[int, Field(ge=0, le=255)] | None = None
    binary: bool = False
    extensions: Extensions | None = None
    follow_links: bool = False
    max_pixels: Count = 100_000_000

    @model_validator(mode="after")
    def _either_classes_or_binary(self) -> Self:
        if self.binary == (self.classes is not None):
            raise ValueError("give either the names of the classes as classes, or binary: true")
        if self.binary and self.ignore_index is not None:
            raise ValueError("ignore_index is an id of a mask of classes; a binary mask has none")
        return self


datasets.add(
    "list_file",
    "paceline.data.datasets.listed:ListFile",
    ListFileArguments,
    "image files and labels that a CSV, TSV, JSON-lines or text file lists",
)
datasets.add(
    "image_mask",
    "paceline.data.datasets.pairs:ImageMask",
    ImageMaskArguments,
    "images with a mask each, in two folders or by a list",
)
