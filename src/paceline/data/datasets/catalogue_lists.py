"""The data sets of list files and of images with masks that recipes can name."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from paceline.core.arguments import Count, CountOrZero
from paceline.core.counting import counted
from paceline.core.registry import register
from paceline.data.argument_types import Name, PixelValue
from paceline.data.catalogue import ClassNames, DrawnSplitArguments, Extensions, SplitArguments

datasets = register.kind("dataset")

Column = Name | CountOrZero
"""A column by name, or by number from 0."""

Colour = Annotated[list[PixelValue], Field(min_length=3, max_length=3)]
"""Red, green and blue."""


def _one_character(delimiter: str) -> str:
    if len(delimiter) != 1 or delimiter in '\r\n"':
        advice = 'a tab is "\\t" in double quotes, and blanks behind delimiters are left out anyway'
        raise ValueError(f"expected one character that is neither a line end nor a quote, got {delimiter!r}; {advice}")
    return delimiter


Delimiter = Annotated[str, AfterValidator(_one_character), Field(json_schema_extra={"minLength": 1, "maxLength": 1})]


class ListArguments(SplitArguments):
    """How lists of all kinds are read, and which of their lines are taken."""

    file: Name
    root: Name | None = None
    format: Literal["csv", "tsv", "json", "jsonl", "txt"] | None = None
    delimiter: Delimiter | None = None
    label: Column | None = None
    label_from: Literal["column", "folder"] = "column"
    label_separator: Name | None = None
    first_label: CountOrZero = 0
    classes: ClassNames | None = None
    split_column: Column | None = None
    fold: CountOrZero | None = None
    fold_column: Column = 3
    follow_links: bool = False

    @model_validator(mode="after")
    def _a_label_from_one_place(self) -> Self:
        given = next((key for key in ("label", "label_separator") if getattr(self, key) is not None), None)
        if self.label_from == "folder" and given is not None:
            raise ValueError(f"label_from: folder takes no column; take {given} out")
        return self

    @model_validator(mode="after")
    def _a_split_that_there_is(self) -> Self:
        """A split has a name, and comes from one place."""
        ways = {"split_column": self.split_column, "fold": self.fold, "split_shares": self.split_shares}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"give either {given[0]} or {given[1]}")
        if self.fold is not None and self.split not in ("train", "val", "test"):
            raise ValueError("with fold, split is train (all other folds), val or test (this fold)")
        if self.split_column is not None and self.split is None:
            raise ValueError("split_column needs split, the word that stands in this column, such as train")
        if self.split is not None and not given:
            raise ValueError(
                "split needs split_column, the column that tells it, fold or split_shares; for a split with a list of"
                " its own, name that as file"
            )
        return self


class ListFileArguments(ListArguments):
    """Arguments of `list_file`."""

    image: Column | None = None
    max_pixels: Count = 100_000_000


class ImageMaskArguments(DrawnSplitArguments):
    """Arguments of `image_mask`."""

    root: Name
    images: Name = "images"
    masks: Name = "masks"
    list_file: Name | None = None
    classes: Annotated[ClassNames, Field(max_length=256)] | None = None
    colours: list[Colour] | None = None
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

    @model_validator(mode="after")
    def _a_colour_for_each_class(self) -> Self:
        colours, num_classes = self.colours, len(self.classes or [])
        if colours is None:
            return self
        if len(colours) != num_classes:
            found = f"got {counted(len(colours), 'colour')} and {counted(num_classes, 'class')}"
            raise ValueError(f"colours needs one [red, green, blue] for each of classes; {found}")
        again = next((each for place, each in enumerate(colours) if each in colours[:place]), None)
        if again is not None:
            raise ValueError(f"colours: expected each colour once, got {again} twice")
        return self


datasets.add(
    "list_file",
    "paceline.data.datasets.listed:ListFile",
    ListFileArguments,
    "image files and labels that a CSV, TSV, JSON or text file lists",
)
datasets.add(
    "image_mask",
    "paceline.data.datasets.pairs:ImageMask",
    ImageMaskArguments,
    "images with a mask each, in two folders or by a list",
)
