"""Transforms of single samples, which bring images of any size to one size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import cv2
import numpy as np
from numpy.typing import NDArray

from paceline.data.batch import Sample

Image = NDArray[np.uint8]
"""One image, uint8 [H, W, C]."""
Size = int | Sequence[int]
"""One number, or height and width."""


@dataclass(frozen=True)
class Resize:
    """Resize to a height and width; one number is the shorter side, and the image keeps its shape."""

    size: Size
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        """The sample with its image resized."""
        image: Image = sample["image"]
        if isinstance(self.size, int):
            shorter = min(image.shape[:2])
            target = image.shape[0] * self.size // shorter, image.shape[1] * self.size // shorter
        else:
            target = _height_and_width(self.size)
        return {**sample, "image": _resized(image, *target)}


@dataclass(frozen=True)
class CenterCrop:
    """Cut out the middle; a smaller image is surrounded with black first."""

    size: Size
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        """The sample with the middle of its image."""
        image: Image = sample["image"]
        height, width = _height_and_width(self.size)
        missing = max(0, height - image.shape[0]), max(0, width - image.shape[1])
        if any(missing):
            above, left = missing[0] // 2, missing[1] // 2
            image = np.pad(image, ((above, missing[0] - above), (left, missing[1] - left), (0, 0)))
        top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
        return {**sample, "image": image[top : top + height, left : left + width]}


@dataclass(frozen=True)
class RandomResizedCrop:
    """Cut out a random part and resize it.

    The aspect (width / height) is drawn first, uniform in its logarithm; then the area, as a share of the
    image, from that part of its range that fits into the image at this aspect; then the place.
    """

    size: Size
    area: Sequence[float] = (0.08, 1.0)
    aspect: Sequence[float] = (3 / 4, 4 / 3)
    draws: ClassVar[int] = 4
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        """The sample with a part of its image."""
        image: Image = sample["image"]
        top, left, height, width = self.box(image.shape[0], image.shape[1], draws)
        part = image[top : top + height, left : left + width]
        return {**sample, "image": _resized(part, *_height_and_width(self.size))}

    def box(self, height: int, width: int, draws: NDArray[np.float64]) -> tuple[int, int, int, int]:
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


def _height_and_width(size: Size) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def _resized(image: Image, height: int, width: int) -> Image:
    """The image at that size; averaging when it shrinks, interpolating when it grows."""
    if image.shape[:2] == (height, width):
        return image
    shrinks = height <= image.shape[0] and width <= image.shape[1]
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    resized: Image = cv2.resize(image, (width, height), interpolation=method)
    return resized if resized.ndim == 3 else resized[:, :, None]
