"""Changes of the colors of an image, uint8 [H, W, C], or of all frames of a clip, [T, H, W, C], alike.

Each gives a new array. Factors are relative: 1 changes nothing. What colors are needs three channels (red, green,
blue); a gray image has none to change, so there these changes do nothing.
"""

from __future__ import annotations

from typing import cast

import cv2
import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError

Pixels = NDArray[np.uint8]
_GREY = np.array([0.299, 0.587, 0.114])  # how bright red, green and blue look
_LEVELS = np.arange(256)


def scale(image: Pixels, factor: float, offset: float = 0.0) -> Pixels:
    """factor · pixel + offset, rounded and cut at 0 and 255."""
    flat = _flat(image)
    return _like(image, cv2.addWeighted(flat, factor, flat, 0, offset))


def contrast(image: Pixels, factor: float) -> Pixels:
    """Away from the mean brightness of the image or clip, or towards it."""
    means = np.array(cv2.mean(_flat(image))[: image.shape[-1]])
    mean = float(means @ _GREY if len(means) == 3 else means.mean())
    return scale(image, factor, (1 - factor) * mean)


def saturation(image: Pixels, factor: float) -> Pixels:
    """Away from gray, or towards it."""
    if not _has_colors(image):
        return image
    matrix = factor * np.eye(3) + (1 - factor) * _GREY
    return _like(image, cv2.transform(_flat(image), matrix))


def hue(image: Pixels, turn: float) -> Pixels:
    """Around the circle of colors; 1 is a whole turn."""
    return hue_and_saturation(image, turn, 1.0)


def hue_and_saturation(image: Pixels, turn: float, factor: float) -> Pixels:
    """In the space of hue, saturation and value: hue turned, and saturation multiplied."""
    if not _has_colors(image):
        return image
    # In whole numbers this would be off by up to ten levels; in float32 it takes little longer.
    cone = cv2.cvtColor(_flat(image).astype(np.float32), cv2.COLOR_RGB2HSV)
    if factor != 1:
        cone[..., 1] = np.minimum(cone[..., 1] * np.float32(factor), 1)
    cone = cv2.add(cone, (360 * (turn % 1), 0, 0, 0), dst=cone)
    return _like(image, cv2.convertScaleAbs(cv2.cvtColor(cone, cv2.COLOR_HSV2RGB, dst=cone)))


def gray(image: Pixels) -> Pixels:
    """Without colors, in as many channels as before."""
    if not _has_colors(image):
        return image
    return _like(image, cv2.cvtColor(cv2.cvtColor(_flat(image), cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB))


def solarize(image: Pixels, threshold: float) -> Pixels:
    """Pixels of the threshold and above inverted."""
    return look_up(image, np.where(threshold <= _LEVELS, 255 - _LEVELS, _LEVELS))


def posterize(image: Pixels, bits: int) -> Pixels:
    """The leading bits alone."""
    return look_up(image, _LEVELS & (256 - (1 << (8 - bits))))


def autocontrast(image: Pixels) -> Pixels:
    """Each channel stretched to 0 … 255; one of a single value stays as it is."""
    tables = []
    for counts in histograms(image):
        found = np.flatnonzero(counts)
        low, high = int(found[0]), int(found[-1])
        tables.append((_LEVELS - low) * 255 / (high - low) if high > low else _LEVELS.astype(np.float64))
    return look_up(image, np.clip(np.floor(np.stack(tables, -1) + 1e-6), 0, 255))


def equalize(image: Pixels) -> Pixels:
    """Each channel with all levels about equally frequent, by Pillow's rule."""
    return look_up(image, np.stack([_equal(counts) for counts in histograms(image)], -1))


def sharpness(image: Pixels, factor: float) -> Pixels:
    """Away from a smoothed version, or towards it; the outermost pixels stay as they are."""
    frames = [_sharpened(frame, factor) for frame in _frames(image)]
    return _like(image, np.stack(frames))


def blur(image: Pixels, sigma: float) -> Pixels:
    """Smoothed by a Gaussian of that standard deviation in pixels, cut off at three of them."""
    size = 2 * int(np.ceil(3 * sigma)) + 1
    frames = [
        cv2.GaussianBlur(frame, (size, size), sigma, borderType=cv2.BORDER_REFLECT_101) for frame in _frames(image)
    ]
    return _like(image, np.stack(frames))


def look_up(image: Pixels, table: NDArray[np.generic]) -> Pixels:
    """Each pixel replaced by what a table has for it: [256], or [256, C] for each channel."""
    levels = table.astype(np.uint8)
    return _like(image, cv2.LUT(_flat(image), levels if levels.ndim == 1 else levels[None]))


def histograms(image: Pixels) -> NDArray[np.int64]:
    """How often each level occurs in each channel, [C, 256]."""
    flat = _flat(image)
    counts = [cv2.calcHist([flat], [channel], None, [256], [0, 256]) for channel in range(image.shape[-1])]
    return np.stack(counts).reshape(-1, 256).astype(np.int64)


def _equal(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    found = counts[counts > 0]
    step = (int(counts.sum()) - int(found[-1])) // 255
    if not step:
        return _LEVELS
    table: NDArray[np.int64] = np.minimum((np.cumsum(counts) - counts + step // 2) // step, 255)
    return table


def _sharpened(frame: Pixels, factor: float) -> Pixels:
    if min(frame.shape[:2]) < 3:
        return frame
    smooth = cv2.filter2D(frame, -1, np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13)
    result = frame.copy()
    inner = (slice(1, -1), slice(1, -1))
    result[inner] = cv2.addWeighted(frame, factor, smooth, 1 - factor, 0).reshape(frame.shape)[inner]
    return result


def _has_colors(image: Pixels) -> bool:
    channels: int = image.shape[-1]
    if channels not in (1, 3):
        raise DataError(f"images of {channels} channels have no colors that could be changed: 1 or 3 are needed")
    return channels == 3


def _refuse_floats(image: Pixels) -> None:
    if image.dtype != np.uint8:
        raise DataError(f"colors are changed in images of uint8, from 0 to 255, but this one is of {image.dtype}")


def _flat(image: Pixels) -> Pixels:
    """One tall image [T · H, W, C], for what is done to each pixel by itself."""
    _refuse_floats(image)
    return image if image.ndim == 3 else image.reshape(-1, *image.shape[2:])


def _frames(image: Pixels) -> list[Pixels]:
    _refuse_floats(image)
    return [image] if image.ndim == 3 else list(image)


def _like(image: Pixels, changed: object) -> Pixels:
    # OpenCV drops the axis of a single channel.
    return cast(Pixels, changed).reshape(image.shape)
