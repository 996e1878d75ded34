"""Geometric transforms: resize, pad, crop, flip and warp an image with its mask and its objects.

Those that keep or set one size for all images also have a form for whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from paceline.core.arguments import AtMost, Count, CountOrZero, ExactlyOneOf, Positive, Share
from paceline.core.errors import ArgumentError, DataError
from paceline.core.registry import register
from paceline.data.argument_types import Degrees, Fill, HeightWidth, PixelValue, PositiveRange, ShareRange, Side, Size
from paceline.data.batch import RAGGED, Sample
from paceline.data.transforms.annotations import (
    AffineMatrix,
    CropBox,
    Floats,
)
from paceline.data.transforms.functional import (
    Draws,
    between,
    center_offset,
    channel_axis,
    crop,
    fill_values,
    height_and_width,
    horizontal_flip,
    resized_crop,
    size_of,
    warp_affine,
)


@register.transform("resize")
@dataclass(frozen=True)
class Resize:
    """Resize to a height and width, or, with one number, the shorter side to it; the image then keeps its shape.

    The longer side becomes at most `max_size`; with `size` null, exactly that.
    """

    size: Size | None
    max_size: Side | None = None
    draws: ClassVar[int] = 0
    reads_encoded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.size is None and self.max_size is None:
            raise ArgumentError("size", "expected a size, or max_size for the longer side")
        if self.max_size is not None and not isinstance(self.size, int | None):
            raise ArgumentError("max_size", "limits the longer side where size is one number or null; take it out")

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        height, width = size_of(sample)
        return resized_crop(sample, CropBox(0, 0, height, width), *self.target(height, width))

    def target(self, height: int, width: int) -> tuple[int, int]:
        """The height and width that an image of this size gets."""
        if self.size is not None and not isinstance(self.size, int):
            return height_and_width(self.size)
        short, long = sorted((height, width))
        new_short, new_long = (short, long) if self.size is None else (self.size, long * self.size // short)
        if self.max_size is not None and (self.size is None or new_long > self.max_size):
            new_short, new_long = self.max_size * new_short // new_long, self.max_size
        new_short, new_long = max(1, new_short), max(1, new_long)
        return (new_short, new_long) if height <= width else (new_long, new_short)


@register.transform("random_resize", checks=[AtMost("min_size", "max_size")])
@dataclass(frozen=True)
class RandomResize:
    """Resize the shorter side to a length drawn from `min_size` to `max_size`; the image keeps its shape."""

    min_size: Side
    max_size: Side
    draws: ClassVar[int] = 1
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        return Resize(self.min_size + int(float(draws[0]) * (self.max_size - self.min_size + 1)))(sample, draws)


@register.transform("random_shortest_size")
@dataclass(frozen=True)
class RandomShortestSize:
    """Resize the shorter side to one of `min_size`, each as likely; `max_size` bounds the longer side.

    The image keeps its shape.
    """

    min_size: Side | Annotated[Sequence[Side], Field(min_length=1)]
    max_size: Side | None = None
    draws: ClassVar[int] = 1
    reads_encoded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        largest = self.min_size if isinstance(self.min_size, int) else max(self.min_size)
        if self.max_size is not None and self.max_size < largest:
            raise ArgumentError("max_size", f"expected at least the largest min_size ({largest}), got {self.max_size}")

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        sizes = [self.min_size] if isinstance(self.min_size, int) else self.min_size
        return Resize(sizes[int(float(draws[0]) * len(sizes))], self.max_size)(sample, draws)


Padding = CountOrZero | Annotated[Sequence[CountOrZero], Field(min_length=4, max_length=4)]


@register.transform("pad", checks=[ExactlyOneOf("padding", "size", "size_divisor")])
@dataclass(frozen=True)
class Pad:
    """Pad every side by `padding` pixels, or on the right and below up to a size or a multiple of a number.

    `padding` is one number, or left, top, right and bottom. An image that is larger than `size` stays as it is.
    """

    padding: Padding | None = None
    fill: Fill = 0
    size: Size | None = None
    size_divisor: Count | None = None
    mask_fill: PixelValue = 0
    draws: ClassVar[int] = 0

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        height, width = size_of(sample)
        padding = self.padding or 0
        left, top, right, bottom = [padding] * 4 if isinstance(padding, int) else padding
        least, divisor = height_and_width(self.size or 1), self.size_divisor or 1
        height, width = max(height + top + bottom, least[0]), max(width + left + right, least[1])
        height, width = (math.ceil(side / divisor) * divisor for side in (height, width))
        return crop(sample, CropBox(-top, -left, height, width), self.fill, self.mask_fill)


@register.transform("center_crop")
@dataclass(frozen=True)
class CenterCrop:
    """Crop the center; a smaller image is padded with `fill` first."""

    size: Size
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    draws: ClassVar[int] = 0

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        return crop(sample, self.box(*size_of(sample)), self.fill, self.mask_fill, self.min_visible)

    def box(self, height: int, width: int) -> CropBox:
        """What is cropped from an image of this size."""
        rows, columns = height_and_width(self.size)
        return CropBox(center_offset(height, rows), center_offset(width, columns), rows, columns)


class _CropSide(NamedTuple):
    """One side of a crop from padded images, with the pixels padded before the first and behind the last one."""

    wanted: int
    before: int
    behind: int
    num_starts: int
    """Where the crop may begin, counted from the first padded pixel."""


@register.transform("random_crop")
@dataclass(frozen=True)
class RandomCrop:
    """Pad every side by `padding` pixels, then crop to `size` at a random place.

    A smaller image is padded evenly up to the size. Padding is filled with `fill`, in masks with `mask_fill`. Boxes are
    clipped to the crop, and an object of which less than the share `min_visible` is left is removed.
    """

    size: Size
    padding: CountOrZero = 0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = True

    def on_sample(self, sample: Sample, draws: Draws) -> Sample:
        sides = zip(self._sides(size_of(sample)), draws, strict=True)
        top, left = (int(float(draw) * side.num_starts) - side.before for side, draw in sides)
        box = CropBox(top, left, *height_and_width(self.size))
        return crop(sample, box, self.fill, self.mask_fill, self.min_visible)

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        _require_no_objects("random_crop", batch)
        images = batch["image"]
        sides = self._sides((images.shape[-2], images.shape[-1]))
        corners = torch.stack([(draws[:, i] * side.num_starts).long() for i, side in enumerate(sides)], 1)
        result = {**batch, "image": _crop_padded(images, corners, sides, self.fill)}
        if "mask" in batch:
            result["mask"] = _crop_padded(batch["mask"], corners, sides, self.mask_fill)
        return result

    def _sides(self, lengths: tuple[int, int]) -> list[_CropSide]:
        sides = []
        for length, wanted in zip(lengths, height_and_width(self.size), strict=True):
            before = max(self.padding, (wanted - length) // 2)
            num_starts = max(1, length + 2 * self.padding - wanted + 1)
            sides.append(_CropSide(wanted, before, num_starts - 1 + wanted - before - length, num_starts))
        return sides


def _crop_padded(images: Tensor, corners: Tensor, sides: Sequence[_CropSide], fill: Fill) -> Tensor:
    """The parts at corners [N, 2] of the padded images [N, ..., H, W]."""
    down, across = sides
    padded = _pad(images, (across.before, across.behind, down.before, down.behind), fill).contiguous()
    # Each row of the result is neighbors in memory: copying rows is faster than indexing pixels.
    stride, plane = padded.shape[-1], padded.shape[-2] * padded.shape[-1]
    planes = torch.arange(0, padded.numel(), plane, device=images.device).view(len(images), -1)
    starts = planes + (corners[:, :1] * stride + corners[:, 1:])
    rows = starts.unsqueeze(-1) + torch.arange(0, down.wanted * stride, stride, device=images.device)
    windows = padded.as_strided((padded.numel() - across.wanted + 1, across.wanted), (1, 1))
    return windows.index_select(0, rows.view(-1)).view(*images.shape[:-2], down.wanted, across.wanted)


def _pad(images: Tensor, pads: tuple[int, int, int, int], fill: Fill) -> Tensor:
    if isinstance(fill, int):
        return F.pad(images, pads, value=fill)
    axis = channel_axis(images)
    planes = zip(images.unbind(axis), fill_values(fill, images.shape[axis]), strict=True)
    return torch.stack([F.pad(plane, pads, value=value) for plane, value in planes], axis)


@register.transform("random_resized_crop")
@dataclass(frozen=True)
class RandomResizedCrop:
    """Crop a random part and resize it.

    `scale` is the range of the part's area as a share of the image, `ratio` that of width / height. The ratio is drawn
    first, uniform in its logarithm; then the area, from that part of its range that fits into the image at this ratio;
    then the place.
    """

    size: Size
    scale: ShareRange = (0.08, 1.0)
    ratio: PositiveRange = (3 / 4, 4 / 3)
    min_visible: Share = 0.1
    draws: ClassVar[int] = 4
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        return resized_crop(sample, self.box(*size_of(sample), draws), *height_and_width(self.size), self.min_visible)

    def box(self, height: int, width: int, draws: Draws) -> CropBox:
        """What is cropped from an image of this size."""
        narrow, wide = (math.log(bound) for bound in self.ratio)
        aspect = math.exp(narrow + (wide - narrow) * float(draws[0]))
        largest = min(self.scale[1], aspect * height / width, width / (aspect * height))
        smallest = min(self.scale[0], largest)
        pixels = (smallest + (largest - smallest) * float(draws[1])) * height * width
        part_width = min(width, max(1, round(math.sqrt(pixels * aspect))))
        part_height = min(height, max(1, round(math.sqrt(pixels / aspect))))
        top = int(float(draws[2]) * (height - part_height + 1))
        left = int(float(draws[3]) * (width - part_width + 1))
        return CropBox(top, left, part_height, part_width)


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
        return horizontal_flip(sample, self.pairs) if draws[0] < self.p else dict(sample)

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        _require_no_objects("random_horizontal_flip", batch)
        is_flipped = draws[:, 0] < self.p
        return {**batch, **{name: _flip_where(batch[name], is_flipped) for name in ("image", "mask") if name in batch}}


def _flip_where(images: Tensor, is_flipped: Tensor) -> Tensor:
    """Images [N, ..., W], those of `is_flipped` [N] flipped horizontally."""
    count = len(images)
    # Copying whole images out of both versions is several times faster than choosing pixel by pixel.
    chosen = torch.arange(count, device=images.device).add_(is_flipped, alpha=count)
    return torch.cat([images, images.flip(-1)]).index_select(0, chosen)


def _require_no_objects(name: str, batch: dict[str, Any]) -> None:
    """What lies on an image is moved sample by sample."""
    if not (RAGGED | {"matrix"}).isdisjoint(batch):
        raise DataError(
            f"{name} moves objects with the image of a single sample: put it before the transforms of batches"
        )


@register.transform("random_rotation")
@dataclass(frozen=True)
class RandomRotation:
    """Rotate around the center by up to `degrees` either way; the size stays, and corners are filled."""

    degrees: Degrees
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    draws: ClassVar[int] = 1

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        matrix = self.matrix(*size_of(sample), draws)
        return warp_affine(sample, matrix, size_of(sample), self.fill, self.mask_fill, self.min_visible)

    def matrix(self, height: int, width: int, draws: Draws) -> AffineMatrix:
        """Where an image of this size is moved."""
        center = (width / 2, height / 2)
        return affine_matrix(center, center, between(draws[0], -self.degrees, self.degrees))


@register.transform("random_affine")
@dataclass(frozen=True)
class RandomAffine:
    """Rotate, translate, scale and shear at random, around the center; the size stays.

    `degrees` and `shear` (of the upright direction, in degrees) are drawn either way; so is `translate`, as shares of
    the width and of the height; `scale` is uniform in its logarithm.
    """

    degrees: Degrees = 0.0
    translate: Annotated[Sequence[Share], Field(min_length=2, max_length=2)] = (0.0, 0.0)
    scale: PositiveRange = (1.0, 1.0)
    shear: Annotated[float, Field(ge=0, le=80)] = 0.0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    draws: ClassVar[int] = 5

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        height, width = size_of(sample)
        center = (width / 2, height / 2)
        across = between(draws[2], -self.translate[0], self.translate[0]) * width
        down = between(draws[3], -self.translate[1], self.translate[1]) * height
        matrix = affine_matrix(
            center,
            (center[0] + across, center[1] + down),
            between(draws[0], -self.degrees, self.degrees),
            draw_scale(draws[1], self.scale),
            between(draws[4], -self.shear, self.shear),
        )
        return warp_affine(sample, matrix, (height, width), self.fill, self.mask_fill, self.min_visible)


@register.transform("pose_crop")
@dataclass(frozen=True)
class PoseCrop:
    """Crop the first object to a fixed size, as pose networks take it, and remove all others.

    Its box, else the box around its keypoints, else the image, is widened to the aspect of `size` and by the factor
    `margin`, then scaled and rotated at random. "matrix" float32 [2, 3] leads from the new image back to the one that
    was read.
    """

    size: HeightWidth
    margin: Positive = 1.25
    scale: PositiveRange = (1.0, 1.0)
    degrees: Degrees = 0.0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    draws: ClassVar[int] = 2

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        height, width = self.size
        first = {name: value[:1] if name in RAGGED else value for name, value in sample.items()}
        left, top, right, bottom = (float(bound) for bound in _first_box(first))
        margin = self.margin * draw_scale(draws[1], self.scale)
        pixels = max((right - left) / width, (bottom - top) / height, 1 / max(height, width)) * margin
        matrix = affine_matrix(
            ((left + right) / 2, (top + bottom) / 2),
            (width / 2, height / 2),
            between(draws[0], -self.degrees, self.degrees),
            1 / pixels,
        )
        first.setdefault("matrix", np.eye(2, 3, dtype=np.float32))
        return warp_affine(first, matrix, (height, width), self.fill, self.mask_fill)


def affine_matrix(
    center: tuple[float, float], target: tuple[float, float], degrees: float, scale: float = 1.0, shear: float = 0.0
) -> AffineMatrix:
    """The matrix that shears, scales and rotates (clockwise) around `center`, and moves that to `target`; both x, y."""
    angle, slant = math.radians(degrees), math.tan(math.radians(shear))
    cosine, sine = scale * math.cos(angle), scale * math.sin(angle)
    linear = np.array([[cosine, -sine], [sine, cosine]]) @ np.array([[1, slant], [0, 1]])
    return np.column_stack([linear, np.array(target) - linear @ np.array(center)])


def draw_scale(draw: float, bounds: Sequence[float]) -> float:
    """A factor between bounds, uniform in its logarithm."""
    return math.exp(between(draw, math.log(bounds[0]), math.log(bounds[1])))


def _first_box(sample: Sample) -> Floats:
    """The box to crop, as x1 y1 x2 y2."""
    if len(sample.get("boxes", ())):
        box: Floats = sample["boxes"][0]
        return box
    if len(sample.get("keypoints", ())):
        labeled = sample["keypoints"][0][sample["keypoints"][0][:, 2] > 0, :2]
        if len(labeled):
            return np.concatenate([labeled.min(0), labeled.max(0)])
    height, width = size_of(sample)
    return np.array([0, 0, width, height], np.float32)
