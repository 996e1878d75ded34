"""RandAugment: a few changes out of fourteen, all of one strength."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.core.arguments import Count, Share
from paceline.core.registry import register
from paceline.data.argument_types import Fill, PixelValue
from paceline.data.batch import Sample
from paceline.data.transforms import tones
from paceline.data.transforms.coordinates import Map, size_of
from paceline.data.transforms.functional import warp

Draws = NDArray[np.float64]
_MOST = 30.0


@register.transform("rand_augment")
@dataclass(frozen=True)
class RandAugment:
    """Apply `num_ops` of the changes, drawn one by one, each as strong as `magnitude`, from 0 to 30.

    Shearing, shifting and turning are around the middle and move masks, boxes and keypoints too; the others change
    colors alone. Those that have two directions go either way. Clips are changed as a whole.
    """

    num_ops: Count = 2
    magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    is_batch: ClassVar[bool] = False

    @property
    def draws(self) -> int:
        """Which change, and which way, for each."""
        return 2 * self.num_ops

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The changed sample."""
        strength = self.magnitude / _MOST
        changed = dict(sample)
        for choice, direction in draws.reshape(-1, 2):
            name = NAMES[int(choice * len(NAMES))]
            signed = strength if direction < 0.5 else -strength
            if name in MOVES:
                changed = self._moved(changed, MOVES[name], signed)
            elif name != "identity":
                changed["image"] = TONES[name](changed["image"], signed)
        return changed

    def _moved(self, sample: Sample, move: Callable[[float, int, int], Map], signed: float) -> Sample:
        height, width = size_of(sample)
        mapping = move(signed, height, width)
        return warp(sample, mapping, height, width, self.fill, self.mask_fill, self.min_visible)


def _around_middle(linear: list[list[float]], height: int, width: int) -> Map:
    middle = np.array([width / 2, height / 2])
    matrix = np.array(linear)
    return np.column_stack([matrix, middle - matrix @ middle])


def _shear_x(signed: float, height: int, width: int) -> Map:
    return _around_middle([[1, 0.3 * signed], [0, 1]], height, width)


def _shear_y(signed: float, height: int, width: int) -> Map:
    return _around_middle([[1, 0], [0.3 * signed, 1]], height, width)


def _translate_x(signed: float, height: int, width: int) -> Map:
    return np.array([[1, 0, round(150 / 331 * width * signed)], [0, 1, 0]], np.float64)


def _translate_y(signed: float, height: int, width: int) -> Map:
    return np.array([[1, 0, 0], [0, 1, round(150 / 331 * height * signed)]], np.float64)


def _rotate(signed: float, height: int, width: int) -> Map:
    angle = math.radians(30 * signed)
    cosine, sine = math.cos(angle), math.sin(angle)
    return _around_middle([[cosine, -sine], [sine, cosine]], height, width)


def _by_factor(
    change: Callable[[tones.Pixels, float], tones.Pixels], image: tones.Pixels, signed: float
) -> tones.Pixels:
    return change(image, 1 + 0.9 * signed)


def _posterize(image: tones.Pixels, signed: float) -> tones.Pixels:
    return tones.posterize(image, 8 - round(4 * abs(signed)))


def _solarize(image: tones.Pixels, signed: float) -> tones.Pixels:
    return tones.solarize(image, 256 - 256 * abs(signed))  # of no strength, nothing is inverted


MOVES = {
    "shear_x": _shear_x,
    "shear_y": _shear_y,
    "translate_x": _translate_x,
    "translate_y": _translate_y,
    "rotate": _rotate,
}
"""Where places go, by the signed strength and the image's height and width."""
TONES: dict[str, Callable[[tones.Pixels, float], tones.Pixels]] = {
    "brightness": partial(_by_factor, tones.scale),
    "saturation": partial(_by_factor, tones.saturation),
    "contrast": partial(_by_factor, tones.contrast),
    "sharpness": partial(_by_factor, tones.sharpness),
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": lambda image, signed: tones.autocontrast(image),
    "equalize": lambda image, signed: tones.equalize(image),
}
"""What becomes of an image, by the signed strength."""
NAMES = ("identity", *MOVES, *TONES)
