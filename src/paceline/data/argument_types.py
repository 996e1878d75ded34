"""Types of arguments that several data sets and transforms take."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from paceline.core.arguments import Count, Positive, Share


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
PixelValue = Annotated[int, Field(ge=0, le=255)]
Fill = PixelValue | Annotated[list[PixelValue], Field(min_length=1)]
"""What is put where no pixel is: one value, or one a channel."""
