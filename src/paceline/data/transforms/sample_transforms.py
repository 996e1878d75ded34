"""Transforms of single samples that cut, scale, pad and mirror: the image with its mask and its objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.data.batch import Sample
from paceline.data.transforms.geometry import Window, middle, size_of
from paceline.data.transforms.joint import frame, mirror, resize
from paceline.data.transforms.pixels import Fill, Image

__all__ = [
    "CenterCrop",
    "Image",
    "Mirror",
    "Pad",
    "RandomFixedCrop",
    "RandomResize",
    "RandomResizedCrop",
    "Resize",
    "Size",
]

Draws = NDArray[np.float64]
Size = int | Sequence[int]
"""One number, or height and width."""


@dataclass(frozen=True)
class Resize:
    """Resize to a height and width, or so that the image keeps its shape.

    With `side`, the shorter or the longer side gets the size: of two numbers, the image covers both or fits into
    both. One number alone is the shorter side.
    """

    size: Size
    side: Literal["shorter", "longer"] | None = None
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, resized."""
        height, width = size_of(sample)
        return resize(sample, Window(0, 0, height, width), *self.target(height, width))

    def target(self, height: int, width: int) -> tuple[int, int]:
        """The height and width that an image of this size gets."""
        wanted = height_and_width(self.size)
        if self.side is None and not isinstance(self.size, int):
            return wanted
        by_height = wanted[0] * width < wanted[1] * height  # the height allows less than the width does
        if self.side != "longer":
            by_height = not by_height
        if by_height:
            return wanted[0], max(1, width * wanted[0] // height)
        return max(1, height * wanted[1] // width), wanted[1]


@dataclass(frozen=True)
class RandomResize:
    """Resize so that the shorter side has a length drawn from `sides`, both included; the image keeps its shape."""

    sides: Sequence[int]
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = False
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, resized."""
        least, most = self.sides
        return Resize(least + int(float(draws[0]) * (most - least + 1)))(sample, draws)


@dataclass(frozen=True)
class Pad:
    """Add to the right and below, up to a size or to the next multiple of a number; larger images stay as they are."""

    size: Size | None = None
    multiple: int | None = None
    fill: Fill = 0
    mask_fill: int = 0
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, padded."""
        height, width = size_of(sample)
        least = height_and_width(self.size or 1)
        step = self.multiple or 1
        height, width = (math.ceil(max(each) / step) * step for each in zip((height, width), least, strict=True))
        return frame(sample, Window(0, 0, height, width), self.fill, self.mask_fill)


@dataclass(frozen=True)
class CenterCrop:
    """Cut out the middle; a smaller image is surrounded with `fill` first."""

    size: Size
    fill: Fill = 0
    mask_fill: int = 0
    min_visible: float = 0.1
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample's middle."""
        height, width = height_and_width(self.size)
        rows, columns = size_of(sample)
        window = Window(middle(rows, height), middle(columns, width), height, width)
        return frame(sample, window, self.fill, self.mask_fill, self.min_visible)


@dataclass(frozen=True)
class RandomFixedCrop:
    """Cut out a part of one size at a random place; a smaller image is surrounded with `fill`, evenly."""

    size: Size
    fill: Fill = 0
    mask_fill: int = 0
    min_visible: float = 0.1
    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample's part."""
        height, width = height_and_width(self.size)
        rows, columns = size_of(sample)
        top = int(float(draws[0]) * (rows - height + 1)) if rows > height else middle(rows, height)
        left = int(float(draws[1]) * (columns - width + 1)) if columns > width else middle(columns, width)
        return frame(sample, Window(top, left, height, width), self.fill, self.mask_fill, self.min_visible)


@dataclass(frozen=True)
class RandomResizedCrop:
    """Cut out a random part and resize it.

    The aspect (width / height) is drawn first, uniform in its logarithm; then the area, as a share of the
    image, from that part of its range that fits into the image at this aspect; then the place.
    """

    size: Size
    area: Sequence[float] = (0.08, 1.0)
    aspect: Sequence[float] = (3 / 4, 4 / 3)
    min_visible: float = 0.1
    draws: ClassVar[int] = 4
    is_batch: ClassVar[bool] = False
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample's part."""
        window = Window(*self.box(*size_of(sample), draws))
        return resize(sample, window, *height_and_width(self.size), self.min_visible)

    def box(self, height: int, width: int, draws: Draws) -> tuple[int, int, int, int]:
        """Top, left, height and width of the part that is cut out of an image of this size."""
        narrow, wide = (math.log(bound) for bound in self.aspect)
        aspect = math.exp(narrow + (wide - narrow) * float(draws[0]))
        largest = min(self.area[1], aspect * height / width, width / (aspect * height))
        smallest = min(self.area[0], largest)
        pixels = (smallest + (largest - smallest) * float(draws[1])) * height * width
        part_width = min(width, max(1, round(math.sqrt(pixels * aspect))))
        part_height = min(height, max(1, round(math.sqrt(pixels / aspect))))
        top = int(float(draws[2]) * (height - part_height + 1))
        left = int(float(draws[3]) * (width - part_width + 1))
        return top, left, part_height, part_width


@dataclass(frozen=True)
class Mirror:
    """Exchange left and right with the given chance.

    `pairs` are the numbers of keypoints that are left and right of a kind: a mirrored left hand is a right one. They
    come from the data set.
    """

    chance: float = 0.5
    pairs: Sequence[Sequence[int]] | None = None
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, perhaps mirrored."""
        return mirror(sample, self.pairs) if draws[0] < self.chance else dict(sample)


def height_and_width(size: Size) -> tuple[int, int]:
    """Both sides; of one number, a square."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width
