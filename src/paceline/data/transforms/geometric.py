"""Geometric transforms: crop, resize, pad and flip an image with its mask and its objects.

Those that keep or set one size for all images also have a form for whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.arguments import Count, CountOrZero, ExactlyOneOf, Ordered, Share
from paceline.core.registry import register
from paceline.data.argument_types import Fill, HeightWidth, PixelValue, PositiveRange, ShareRange, Size
from paceline.data.batch import Sample
from paceline.data.sample_types import Image
from paceline.data.transforms.batch_objects import (
    CropSide,
    crop_padded,
    either,
    has_objects,
    mirror_objects,
    retrace,
    shift,
)
from paceline.data.transforms.coordinates import Window, middle, size_of
from paceline.data.transforms.functional import frame, mirror, resize

__all__ = [
    "CenterCrop",
    "Image",
    "Pad",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomShortestSize",
    "Resize",
    "Size",
]

Draws = NDArray[np.float64]


@register.transform("resize")
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


@register.transform("random_shortest_size")
@dataclass(frozen=True)
class RandomShortestSize:
    """Resize the shorter side to a length drawn from the range `min_size`; the image keeps its shape.

    Unlike torchvision's, `min_size` is the least and the greatest length, not a list to choose from.
    """

    min_size: Annotated[HeightWidth, Ordered()]
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = False
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, resized."""
        least, most = self.min_size
        return Resize(least + int(float(draws[0]) * (most - least + 1)))(sample, draws)


@register.transform("pad", checks=[ExactlyOneOf("size", "multiple")])
@dataclass(frozen=True)
class Pad:
    """Add to the right and below, up to a size or to the next multiple of a number; larger images stay as they are."""

    size: Size | None = None
    multiple: Count | None = None
    fill: Fill = 0
    mask_fill: PixelValue = 0
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, padded."""
        height, width = size_of(sample)
        least = height_and_width(self.size or 1)
        step = self.multiple or 1
        height, width = (math.ceil(max(each) / step) * step for each in zip((height, width), least, strict=True))
        return frame(sample, Window(0, 0, height, width), self.fill, self.mask_fill)


@register.transform("center_crop")
@dataclass(frozen=True)
class CenterCrop:
    """Cut out the middle; a smaller image is surrounded with `fill` first."""

    size: Size
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample's middle."""
        height, width = height_and_width(self.size)
        rows, columns = size_of(sample)
        window = Window(middle(rows, height), middle(columns, width), height, width)
        return frame(sample, window, self.fill, self.mask_fill, self.min_visible)


@register.transform("random_crop")
@dataclass(frozen=True)
class RandomCrop:
    """Pad every side by `padding` pixels, then crop to `size` at a random place.

    A smaller image is padded evenly up to the size. Padding is filled with `fill`, in masks with `mask_fill`. Boxes are
    cut at the border, and an object of which less than the share `min_visible` is left is removed.
    """

    size: Size
    padding: CountOrZero = 0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = True
    unifies_size: ClassVar[bool] = True

    def on_sample(self, sample: Sample, draws: Draws) -> Sample:
        """The sample's part."""
        sides = zip(self._sides(size_of(sample)), draws, strict=True)
        top, left = (int(float(draw) * side.places) - side.margin for side, draw in sides)
        window = Window(top, left, *height_and_width(self.size))
        return frame(sample, window, self.fill, self.mask_fill, self.min_visible)

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The batch, each image cropped at a place of its own."""
        images = batch["image"]
        sides = self._sides((images.shape[-2], images.shape[-1]))
        corners = torch.stack([(draws[:, i] * side.places).long() for i, side in enumerate(sides)], 1)
        result = {**batch, "image": crop_padded(images, corners, sides, self.fill)}
        if "mask" in batch:
            result["mask"] = crop_padded(batch["mask"], corners, sides, self.mask_fill)
        offsets = torch.stack([side.margin - corners[:, i] for i, side in enumerate(sides)], 1).flip(1).float()
        if "matrix" in batch:
            result["matrix"] = retrace(batch["matrix"], torch.ones_like(offsets), offsets)
        if has_objects(batch):
            result |= shift(
                batch,
                offsets,
                height_and_width(self.size),
                lambda masks, owners: crop_padded(masks, corners[owners], sides, 0),
                self.min_visible,
            )
        return result

    def _sides(self, lengths: tuple[int, int]) -> tuple[CropSide, CropSide]:
        down, across = (
            CropSide(
                length,
                wanted,
                max(self.padding, (wanted - length) // 2),
                max(1, length + 2 * self.padding - wanted + 1),
            )
            for length, wanted in zip(lengths, height_and_width(self.size), strict=True)
        )
        return down, across


@register.transform("random_resized_crop")
@dataclass(frozen=True)
class RandomResizedCrop:
    """Cut out a random part and resize it.

    `scale` is the range of the part's area as a share of the image, `ratio` that of width / height. The ratio is drawn
    first, uniform in its logarithm; then the area, from that part of its range that fits into the image at this ratio;
    then the place.
    """

    size: Size
    scale: ShareRange = (0.08, 1.0)
    ratio: PositiveRange = (3 / 4, 4 / 3)
    min_visible: Share = 0.1
    draws: ClassVar[int] = 4
    is_batch: ClassVar[bool] = False
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample's part."""
        window = Window(*self.box(*size_of(sample), draws))
        return resize(sample, window, *height_and_width(self.size), self.min_visible)

    def box(self, height: int, width: int, draws: Draws) -> tuple[int, int, int, int]:
        """Top, left, height and width of the part that is cut out of an image of this size."""
        narrow, wide = (math.log(bound) for bound in self.ratio)
        aspect = math.exp(narrow + (wide - narrow) * float(draws[0]))
        largest = min(self.scale[1], aspect * height / width, width / (aspect * height))
        smallest = min(self.scale[0], largest)
        pixels = (smallest + (largest - smallest) * float(draws[1])) * height * width
        part_width = min(width, max(1, round(math.sqrt(pixels * aspect))))
        part_height = min(height, max(1, round(math.sqrt(pixels / aspect))))
        top = int(float(draws[2]) * (height - part_height + 1))
        left = int(float(draws[3]) * (width - part_width + 1))
        return top, left, part_height, part_width


@register.transform("random_horizontal_flip")
@dataclass(frozen=True)
class RandomHorizontalFlip:
    """Flip left and right with probability `p`, masks and objects too; clips as a whole.

    `pairs` are the numbers of keypoints that are left and right of a kind: a flipped left hand is a right one. They
    come from the data set.
    """

    p: Share = 0.5
    pairs: Sequence[Sequence[int]] | None = None
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = True
    keeps_counts: ClassVar[bool] = True

    def on_sample(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, perhaps flipped."""
        return mirror(sample, self.pairs) if draws[0] < self.p else dict(sample)

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The batch, some of its samples flipped."""
        images, flipped = batch["image"], draws[:, 0] < self.p
        result = {**batch, "image": either(images, flipped)}
        if "mask" in batch:
            result["mask"] = either(batch["mask"], flipped)
        if has_objects(batch):
            result |= mirror_objects(batch, flipped, images.shape[-1], self.pairs)
        if "matrix" in batch:
            sides = torch.stack([flipped, torch.zeros_like(flipped)], 1).float()
            result["matrix"] = retrace(batch["matrix"], 1 - 2 * sides, sides * images.shape[-1])
        return result


def height_and_width(size: Size) -> tuple[int, int]:
    """Both sides; of one number, a square."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width
