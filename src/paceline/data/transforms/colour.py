"""Sample transforms of colours; all frames of a clip are changed alike, and nothing but the image changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.batch import Sample
from paceline.data.transforms import tones

Draws = NDArray[np.float64]


@dataclass(frozen=True)
class ColorJitter:
    """Change brightness, contrast and saturation by factors from 1 − x to 1 + x, and turn the hue by −x to x.

    The four come in a drawn order, each with its own factor.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    chance: float = 1.0
    draws: ClassVar[int] = 9
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample with the colours of its image changed."""
        if draws[8] >= self.chance:
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


@dataclass(frozen=True)
class PhotometricDistortion:
    """SSD's distortion: each of brightness, contrast, saturation, hue and the order of channels changes by `chance`.

    Brightness adds up to so many levels; contrast multiplies, before saturation and hue or after them; hue turns
    by up to so many degrees.
    """

    brightness: float = 32.0
    contrast: Sequence[float] = (0.5, 1.5)
    saturation: Sequence[float] = (0.5, 1.5)
    hue: float = 18.0
    chance: float = 0.5
    draws: ClassVar[int] = 11
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample with its image distorted."""
        bright, contrast, saturation, hue, order = (float(draw) for draw in draws[:5])
        chosen = draws[5:10] < self.chance
        image = sample["image"]
        offset = self.brightness * (2 * bright - 1) if chosen[0] else 0.0
        factor = _between(self.contrast, contrast) if chosen[1] else 1.0
        is_late = draws[10] < 0.5
        if offset:
            image = tones.scale(image, 1.0, offset)
        if factor != 1 and not is_late:
            image = tones.scale(image, factor)
        if chosen[2] or chosen[3]:
            turn = self.hue / 360 * (2 * hue - 1) if chosen[3] else 0.0
            image = tones.hue_and_saturation(image, turn, _between(self.saturation, saturation) if chosen[2] else 1.0)
        if factor != 1 and is_late:
            image = tones.scale(image, factor)
        if chosen[4] and image.shape[-1] == 3:
            image = np.ascontiguousarray(image[..., _ORDERS[int(order * len(_ORDERS))]])
        return {**sample, "image": image}


_ORDERS = ([0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0])


@dataclass(frozen=True)
class Grayscale:
    """Take the colours away, by chance."""

    chance: float = 0.1
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, perhaps in grey, with as many channels as before."""
        return sample if draws[0] >= self.chance else {**sample, "image": tones.grey(sample["image"])}


@dataclass(frozen=True)
class GaussianBlur:
    """Smooth by a Gaussian whose standard deviation, in pixels, is drawn from a range; by chance."""

    sigma: Sequence[float] = (0.1, 2.0)
    chance: float = 0.5
    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, perhaps with its image smoothed."""
        if draws[0] >= self.chance:
            return sample
        return {**sample, "image": tones.blur(sample["image"], _between(self.sigma, float(draws[1])))}


@dataclass(frozen=True)
class Solarize:
    """Invert the pixels of the threshold (of 0 … 255) and above, by chance."""

    threshold: float = 128.0
    chance: float = 0.2
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The sample, perhaps with the bright part of its image inverted."""
        return (
            sample if draws[0] >= self.chance else {**sample, "image": tones.solarize(sample["image"], self.threshold)}
        )


def _between(bounds: Sequence[float], draw: float) -> float:
    low, high = bounds
    return low + (high - low) * draw
