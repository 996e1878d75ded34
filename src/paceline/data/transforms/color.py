"""Sample transforms of colors; all frames of a clip are changed alike, and nothing but the image changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.core.arguments import NonNegative, Ordered, Share
from paceline.core.registry import register
from paceline.data.argument_types import PositiveRange
from paceline.data.batch import Sample
from paceline.data.transforms import tones

Draws = NDArray[np.float64]
HueRange = Annotated[Sequence[Annotated[float, Field(ge=-0.5, le=0.5)]], Field(min_length=2, max_length=2), Ordered()]


@register.transform("color_jitter")
@dataclass(frozen=True)
class ColorJitter:
    """Change brightness, contrast and saturation by factors from 1 − x to 1 + x, and turn the hue by −x to x.

    The four come in a drawn order, each with its own factor; with probability 1 − `p`, nothing changes.
    """

    brightness: NonNegative = 0.0
    contrast: NonNegative = 0.0
    saturation: NonNegative = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    p: Share = 1.0
    draws: ClassVar[int] = 9
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample with the colors of its image changed."""
        if draws[8] >= self.p:
            return sample
        image = sample["image"]
        amounts = (self.brightness, self.contrast, self.saturation, self.hue)
        changes = (tones.scale, tones.contrast, tones.saturation, tones.hue)
        for number in np.argsort(draws[4:8], kind="stable"):
            amount = amounts[number]
            if amount:
                middle = 0.0 if number == 3 else 1.0
                factor = middle + amount * (2 * float(draws[number]) - 1)
                image = changes[number](image, factor if number == 3 else max(0.0, factor))
        return {**sample, "image": image}


@register.transform("random_photometric_distort")
@dataclass(frozen=True)
class RandomPhotometricDistort:
    """Change brightness, contrast, saturation, hue and the order of channels as SSD does, each with probability `p`.

    Contrast and saturation are ranges of factors, hue is one of turns around the color circle; contrast comes before
    saturation and hue or after them. Unlike torchvision's, `brightness` is added: up to so many levels of 255.
    """

    brightness: Annotated[float, Field(ge=0, le=255)] = 32.0
    contrast: PositiveRange = (0.5, 1.5)
    saturation: PositiveRange = (0.5, 1.5)
    hue: HueRange = (-0.05, 0.05)
    p: Share = 0.5
    draws: ClassVar[int] = 11
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample with its image distorted."""
        bright, contrast, saturation, hue, order = (float(draw) for draw in draws[:5])
        chosen = draws[5:10] < self.p
        image = sample["image"]
        offset = self.brightness * (2 * bright - 1) if chosen[0] else 0.0
        factor = _between(self.contrast, contrast) if chosen[1] else 1.0
        is_late = draws[10] < 0.5
        if offset:
            image = tones.scale(image, 1.0, offset)
        if factor != 1 and not is_late:
            image = tones.scale(image, factor)
        if chosen[2] or chosen[3]:
            turn = _between(self.hue, hue) if chosen[3] else 0.0
            image = tones.hue_and_saturation(image, turn, _between(self.saturation, saturation) if chosen[2] else 1.0)
        if factor != 1 and is_late:
            image = tones.scale(image, factor)
        if chosen[4] and image.shape[-1] == 3:
            image = np.ascontiguousarray(image[..., _ORDERS[int(order * len(_ORDERS))]])
        return {**sample, "image": image}


_ORDERS = ([0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0])


@register.transform("random_grayscale")
@dataclass(frozen=True)
class RandomGrayscale:
    """Convert to gray with probability `p`."""

    p: Share = 0.1
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, perhaps in gray, with as many channels as before."""
        return sample if draws[0] >= self.p else {**sample, "image": tones.gray(sample["image"])}


@register.transform("gaussian_blur")
@dataclass(frozen=True)
class GaussianBlur:
    """Blur with probability `p` by a Gaussian whose standard deviation, in pixels, is drawn from the range `sigma`."""

    sigma: PositiveRange = (0.1, 2.0)
    p: Share = 0.5
    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, perhaps with its image smoothed."""
        if draws[0] >= self.p:
            return sample
        return {**sample, "image": tones.blur(sample["image"], _between(self.sigma, float(draws[1])))}


@register.transform("random_solarize")
@dataclass(frozen=True)
class RandomSolarize:
    """Invert the pixels at or above `threshold` (0 to 255) with probability `p`."""

    threshold: Annotated[float, Field(ge=0, le=255)] = 128.0
    p: Share = 0.5
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, perhaps with the bright part of its image inverted."""
        return sample if draws[0] >= self.p else {**sample, "image": tones.solarize(sample["image"], self.threshold)}


def _between(bounds: Sequence[float], draw: float) -> float:
    low, high = bounds
    return low + (high - low) * draw
