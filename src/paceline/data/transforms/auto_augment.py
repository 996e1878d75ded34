"""RandAugment: a few operations out of fourteen, all of one magnitude."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from paceline.core.arguments import Count, Share
from paceline.core.registry import register
from paceline.data.argument_types import Fill, PixelValue
from paceline.data.batch import Sample
from paceline.data.transforms import color
from paceline.data.transforms.annotations import AffineMatrix
from paceline.data.transforms.functional import Draws, size_of, warp_affine

_MAX_MAGNITUDE = 30.0


@register.transform("rand_augment")
@dataclass(frozen=True)
class RandAugment:
    """Apply `num_ops` operations, drawn one by one, each as strong as `magnitude`, from 0 to 30.

    Shear, translate and rotate move masks, boxes and keypoints too, around the center; the others change colors alone.
    Operations with two directions go either way. Clips are changed as a whole.
    """

    num_ops: Count = 2
    magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    is_batch: ClassVar[bool] = False

    @property
    def draws(self) -> int:
        """The operation and its direction, for each."""
        return 2 * self.num_ops

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        """The augmented sample."""
        strength = self.magnitude / _MAX_MAGNITUDE
        changed = dict(sample)
        for choice, direction in draws.reshape(-1, 2):
            name = OPERATIONS[int(choice * len(OPERATIONS))]
            signed = strength if direction < 0.5 else -strength
            if name in AFFINE_OPERATIONS:
                size = size_of(changed)
                matrix = AFFINE_OPERATIONS[name](signed, *size)
                changed = warp_affine(changed, matrix, size, self.fill, self.mask_fill, self.min_visible)
            elif name != "identity":
                changed["image"] = COLOR_OPERATIONS[name](changed["image"], signed)
        return changed


def _around_center(linear: list[list[float]], height: int, width: int) -> AffineMatrix:
    center, matrix = np.array([width / 2, height / 2]), np.array(linear)
    return np.column_stack([matrix, center - matrix @ center])


def _shear_x(signed: float, height: int, width: int) -> AffineMatrix:
    return _around_center([[1, 0.3 * signed], [0, 1]], height, width)


def _shear_y(signed: float, height: int, width: int) -> AffineMatrix:
    return _around_center([[1, 0], [0.3 * signed, 1]], height, width)


def _translate_x(signed: float, height: int, width: int) -> AffineMatrix:
    return np.array([[1, 0, round(150 / 331 * width * signed)], [0, 1, 0]], np.float64)


def _translate_y(signed: float, height: int, width: int) -> AffineMatrix:
    return np.array([[1, 0, 0], [0, 1, round(150 / 331 * height * signed)]], np.float64)


def _rotate(signed: float, height: int, width: int) -> AffineMatrix:
    angle = math.radians(30 * signed)
    cosine, sine = math.cos(angle), math.sin(angle)
    return _around_center([[cosine, -sine], [sine, cosine]], height, width)


ColorChange = Callable[[color.Pixels, float], color.Pixels]


def _adjust(change: ColorChange, image: color.Pixels, signed: float) -> color.Pixels:
    return change(image, 1 + 0.9 * signed)


AFFINE_OPERATIONS = {
    "shear_x": _shear_x,
    "shear_y": _shear_y,
    "translate_x": _translate_x,
    "translate_y": _translate_y,
    "rotate": _rotate,
}
"""The matrix by the signed strength and the image's height and width."""
COLOR_OPERATIONS: dict[str, ColorChange] = {
    "brightness": partial(_adjust, color.scale_pixels),
    "saturation": partial(_adjust, color.adjust_saturation),
    "contrast": partial(_adjust, color.adjust_contrast),
    "sharpness": partial(_adjust, color.adjust_sharpness),
    "posterize": lambda image, signed: color.posterize(image, 8 - round(4 * abs(signed))),
    # Of no strength, nothing is inverted.
    "solarize": lambda image, signed: color.solarize(image, 256 - 256 * abs(signed)),
    "autocontrast": lambda image, signed: color.autocontrast(image),
    "equalize": lambda image, signed: color.equalize(image),
}
"""The changed image by the signed strength."""
OPERATIONS = ("identity", *AFFINE_OPERATIONS, *COLOR_OPERATIONS)
