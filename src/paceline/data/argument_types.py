"""Types of arguments that several data sets and transforms take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from paceline.core.arguments import CountOrZero, Ordered, PartialShare, Positive, Share, SumsToOne, Unique

_TWO = Field(min_length=2, max_length=2)

Side = Annotated[int, Field(ge=1, le=32_767)]
"""A height or a width; OpenCV takes no more."""
Name = Annotated[str, Field(min_length=1)]
HeightWidth = Annotated[Sequence[Side], _TWO]
Size = Side | HeightWidth
"""One number, or height and width."""
PositiveRange = Annotated[Sequence[Positive], _TWO, Ordered()]
ShareRange = Annotated[Sequence[Annotated[Share, Field(gt=0)]], _TWO, Ordered()]
Degrees = Annotated[float, Field(ge=0, le=180)]

PixelValue = Annotated[int, Field(ge=0, le=255)]
Fill = PixelValue | Annotated[Sequence[PixelValue], Field(min_length=1)]
"""What is put where no pixel is: one value, or one a channel."""
_Ids = Annotated[int, Field(ge=0, le=65_535)] | Annotated[str, Field(pattern=r"^[0-9]{1,5}-[0-9]{1,5}$")]
IdRanges = _Ids | Annotated[Sequence[_Ids], Field(min_length=1)]
"""Ids in a mask: one, a range such as "1-255", or a list of both."""
Color = Annotated[Sequence[PixelValue], Field(min_length=3, max_length=3)]
"""Red, green and blue."""

Extensions = Annotated[Sequence[Annotated[str, Field(pattern=r"^\.")]], Field(min_length=1)]
ClassNames = Annotated[Sequence[Name], Field(min_length=1), Unique()]
KeypointPairs = Sequence[Annotated[Sequence[CountOrZero], _TWO]]
SplitShares = Annotated[Mapping[Name, Annotated[PartialShare, Field(gt=0)]], Field(min_length=2), SumsToOne()]
"""How a data set is split at random: each part's share of it."""
Column = Name | CountOrZero
"""A column of a list by the name in its first line, or by number from 0."""
Delimiter = Annotated[str, Field(pattern=r'^[^\r\n"]$')]
