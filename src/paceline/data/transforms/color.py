"""Color transforms of samples, the functions they are made of, and RandAugment; all frames of a clip are changed alike.

An image is uint8 [H, W, C], a clip [T, H, W, C]. Factors are relative: 1 changes nothing. Colors need three channels
(red, green, blue); a gray image stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, cast

import cv2
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.core.arguments import Count, NonNegative, Ordered, Share
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import Fill, PixelValue, PositiveRange
from paceline.data.batch import Sample
from paceline.data.transforms.annotations import AffineMatrix
from paceline.data.transforms.functional import Draws, between, size_of, warp_affine
from paceline.data.transforms.geometric import affine_matrix

Pixels = NDArray[np.uint8]
LUMA = np.array([0.299, 0.587, 0.114])  # how bright red, green and blue look
_LEVELS = np.arange(256)
_ORDERS = ([0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0])  # of channels
_NEUTRAL = (1.0, 1.0, 1.0, 0.0)

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

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        image, factors = sample["image"], self.factors(draws)
        for number in np.argsort(draws[4:8], kind="stable"):
            if factors[number] != _NEUTRAL[number]:
                image = _ADJUSTMENTS[number](image, factors[number])
        return {**sample, "image": image}

    def factors(self, draws: Draws) -> tuple[float, float, float, float]:
        """What brightness, contrast and saturation are multiplied by, and the share of a turn that is added to hue."""
        if draws[8] >= self.p:
            return _NEUTRAL
        amounts = (self.brightness, self.contrast, self.saturation)
        by = [max(0.0, 1 + amount * (2 * float(draw) - 1)) for amount, draw in zip(amounts, draws, strict=False)]
        return by[0], by[1], by[2], self.hue * (2 * float(draws[3]) - 1)


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

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
        bright, contrast, saturation, hue, order = (float(draw) for draw in draws[:5])
        chosen = draws[5:10] < self.p
        image = sample["image"]
        offset = self.brightness * (2 * bright - 1) if chosen[0] else 0.0
        factor = between(contrast, *self.contrast) if chosen[1] else 1.0
        is_late = draws[10] < 0.5
        if offset:
            image = scale_pixels(image, 1.0, offset)
        if factor != 1 and not is_late:
            image = scale_pixels(image, factor)
        if chosen[2] or chosen[3]:
            turn = between(hue, *self.hue) if chosen[3] else 0.0
            image = adjust_hue_and_saturation(image, turn, between(saturation, *self.saturation) if chosen[2] else 1.0)
        if factor != 1 and is_late:
            image = scale_pixels(image, factor)
        if chosen[4] and image.shape[-1] == 3:
            image = np.ascontiguousarray(image[..., _ORDERS[int(order * len(_ORDERS))]])
        return {**sample, "image": image}


def scale_pixels(image: Pixels, factor: float, offset: float = 0.0) -> Pixels:
    """factor · pixel + offset, rounded and cut at 0 and 255."""
    tall = _as_tall_image(image)
    return _as_shape_of(image, cv2.addWeighted(tall, factor, tall, 0, offset))


def adjust_contrast(image: Pixels, factor: float) -> Pixels:
    """Away from the mean brightness of the image or clip (factor > 1), or toward it."""
    means = np.array(cv2.mean(_as_tall_image(image))[: image.shape[-1]])
    mean = float(means @ LUMA if len(means) == 3 else means.mean())
    return scale_pixels(image, factor, (1 - factor) * mean)


def adjust_saturation(image: Pixels, factor: float) -> Pixels:
    """Away from gray (factor > 1), or toward it."""
    if not _is_rgb(image):
        return image
    matrix = factor * np.eye(3) + (1 - factor) * LUMA
    return _as_shape_of(image, cv2.transform(_as_tall_image(image), matrix))


def adjust_hue(image: Pixels, turn: float) -> Pixels:
    """The hue shifted; 1 is a whole turn around the color circle."""
    return adjust_hue_and_saturation(image, turn, 1.0)


def adjust_hue_and_saturation(image: Pixels, turn: float, factor: float) -> Pixels:
    """In HSV: the hue shifted, and the saturation multiplied by `factor`."""
    if not _is_rgb(image):
        return image
    # In whole numbers this would be off by up to ten levels; in float32 it takes little longer.
    hsv = cv2.cvtColor(_as_tall_image(image).astype(np.float32), cv2.COLOR_RGB2HSV)
    if factor != 1:
        hsv[..., 1] = np.minimum(hsv[..., 1] * np.float32(factor), 1)
    hsv = cv2.add(hsv, (360 * (turn % 1), 0, 0, 0), dst=hsv)
    return _as_shape_of(image, cv2.convertScaleAbs(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=hsv)))


_ADJUSTMENTS = (scale_pixels, adjust_contrast, adjust_saturation, adjust_hue)


def solarize(image: Pixels, threshold: float) -> Pixels:
    """Pixels at or above the threshold inverted."""
    return apply_lut(image, np.where(threshold <= _LEVELS, 255 - _LEVELS, _LEVELS))


def posterize(image: Pixels, bits: int) -> Pixels:
    """Pixels reduced to their leading bits."""
    return apply_lut(image, _LEVELS & (256 - (1 << (8 - bits))))


def autocontrast(image: Pixels) -> Pixels:
    """Each channel stretched to 0 … 255; one of a single value stays as it is."""
    tables = []
    for counts in channel_histograms(image):
        found = np.flatnonzero(counts)
        low, high = int(found[0]), int(found[-1])
        tables.append((_LEVELS - low) * 255 / (high - low) if high > low else _LEVELS.astype(np.float64))
    return apply_lut(image, np.clip(np.floor(np.stack(tables, -1) + 1e-6), 0, 255))


def equalize(image: Pixels) -> Pixels:
    """Each channel with all levels about equally frequent, by Pillow's rule."""
    return apply_lut(image, np.stack([_equalize_lut(counts) for counts in channel_histograms(image)], -1))


def adjust_sharpness(image: Pixels, factor: float) -> Pixels:
    """Away from a smoothed version (factor > 1), or toward it; the outermost pixels stay as they are."""
    frames = [_sharpen(frame, factor) for frame in _frames(image)]
    return _as_shape_of(image, np.stack(frames))


def apply_lut(image: Pixels, table: NDArray[np.generic]) -> Pixels:
    """Pixels replaced by a lookup table [256], or [256, C] with one for each channel."""
    levels = table.astype(np.uint8)
    return _as_shape_of(image, cv2.LUT(_as_tall_image(image), levels if levels.ndim == 1 else levels[None]))


def channel_histograms(image: Pixels) -> NDArray[np.int64]:
    """How often each level occurs in each channel, [C, 256]."""
    tall = _as_tall_image(image)
    counts = [cv2.calcHist([tall], [channel], None, [256], [0, 256]) for channel in range(image.shape[-1])]
    return np.stack(counts).reshape(-1, 256).astype(np.int64)


def _equalize_lut(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    found = counts[counts > 0]
    step = (int(counts.sum()) - int(found[-1])) // 255
    if not step:
        return _LEVELS
    table: NDArray[np.int64] = np.minimum((np.cumsum(counts) - counts + step // 2) // step, 255)
    return table


def _sharpen(frame: Pixels, factor: float) -> Pixels:
    if min(frame.shape[:2]) < 3:
        return frame
    smooth = cv2.filter2D(frame, -1, np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13)
    result = frame.copy()
    inner = (slice(1, -1), slice(1, -1))
    result[inner] = cv2.addWeighted(frame, factor, smooth, 1 - factor, 0).reshape(frame.shape)[inner]
    return result


def _is_rgb(image: Pixels) -> bool:
    channels: int = image.shape[-1]
    if channels not in (1, 3):
        raise DataError(f"color transforms take images of 1 or 3 channels; this one has {channels}")
    return channels == 3


def _require_uint8(image: Pixels) -> None:
    if image.dtype != np.uint8:
        raise DataError(f"color transforms take uint8 images, from 0 to 255; this one is {image.dtype}")


def _as_tall_image(image: Pixels) -> Pixels:
    """One tall image [T · H, W, C], for what is done to each pixel by itself."""
    _require_uint8(image)
    return image if image.ndim == 3 else image.reshape(-1, *image.shape[2:])


def _frames(image: Pixels) -> list[Pixels]:
    _require_uint8(image)
    return [image] if image.ndim == 3 else list(image)


def _as_shape_of(image: Pixels, changed: object) -> Pixels:
    # OpenCV drops the axis of a single channel.
    return cast(Pixels, changed).reshape(image.shape)


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

    @property
    def draws(self) -> int:
        """The operation and its direction, for each."""
        return 2 * self.num_ops

    def __call__(self, sample: Sample, draws: Draws) -> Sample:
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


def _rotate(signed: float, height: int, width: int) -> AffineMatrix:
    center = width / 2, height / 2
    return affine_matrix(center, center, 30 * signed)


def _translate(x: float, y: float) -> AffineMatrix:
    return np.array([[1, 0, round(x)], [0, 1, round(y)]], np.float64)


ColorChange = Callable[[Pixels, float], Pixels]


AFFINE_OPERATIONS: dict[str, Callable[[float, int, int], AffineMatrix]] = {
    "shear_x": lambda signed, height, width: _around_center([[1, 0.3 * signed], [0, 1]], height, width),
    "shear_y": lambda signed, height, width: _around_center([[1, 0], [0.3 * signed, 1]], height, width),
    "translate_x": lambda signed, height, width: _translate(150 / 331 * width * signed, 0),
    "translate_y": lambda signed, height, width: _translate(0, 150 / 331 * height * signed),
    "rotate": _rotate,
}
"""The matrix by the signed strength and the image's height and width."""
COLOR_OPERATIONS: dict[str, ColorChange] = {
    "brightness": lambda image, signed: scale_pixels(image, 1 + 0.9 * signed),
    "saturation": lambda image, signed: adjust_saturation(image, 1 + 0.9 * signed),
    "contrast": lambda image, signed: adjust_contrast(image, 1 + 0.9 * signed),
    "sharpness": lambda image, signed: adjust_sharpness(image, 1 + 0.9 * signed),
    "posterize": lambda image, signed: posterize(image, 8 - round(4 * abs(signed))),
    # Of no strength, nothing is inverted.
    "solarize": lambda image, signed: solarize(image, 256 - 256 * abs(signed)),
    "autocontrast": lambda image, signed: autocontrast(image),
    "equalize": lambda image, signed: equalize(image),
}
"""The changed image by the signed strength."""
OPERATIONS = ("identity", *AFFINE_OPERATIONS, *COLOR_OPERATIONS)
