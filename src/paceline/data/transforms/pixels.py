"""Images, clips and masks cut, scaled, turned and mirrored. Results may share memory with what is given.

An image is uint8 or float32 [H, W, C], a clip [T, H, W, C]; a mask is uint8 [H, W], masks of objects [K, H, W].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.argument_types import Fill
from paceline.data.sample_types import Image
from paceline.data.transforms.coordinates import Map, Window, compose
from paceline.data.transforms.resizing import resize_image

Mask = NDArray[np.uint8]

_LONGEST = 32_766  # pixels on a side that OpenCV can warp
# Samples are worked on side by side by the loader's workers: threads inside would compete with them.
cv2.setNumThreads(1)


def frame_image(image: Image, window: Window, fill: Fill = 0) -> Image:
    """The part of an image in a window of whole pixels; what lies beyond the image is filled."""
    top, left, height, width = (int(bound) for bound in window)
    here, there = _overlap(image.shape[-3:-1], top, left, height, width)
    part = image[(..., *there, slice(None))]
    if part.shape[-3:-1] == (height, width):
        return part
    channels = image.shape[-1]
    row = np.empty((width, channels), image.dtype)
    row[:] = fill_values(fill, channels)
    framed = np.empty((*image.shape[:-3], height, width, channels), image.dtype)
    framed[...] = row  # rows are copied much faster than pixels are set
    framed[(..., *here, slice(None))] = part
    return framed


def frame_mask(mask: Mask, window: Window, fill: int = 0) -> Mask:
    """The same of a mask [H, W] or of masks [K, H, W]."""
    top, left, height, width = (int(bound) for bound in window)
    here, there = _overlap(mask.shape[-2:], top, left, height, width)
    part = mask[(..., *there)]
    if part.shape[-2:] == (height, width):
        return part
    framed = np.full((*mask.shape[:-2], height, width), fill, mask.dtype)
    framed[(..., *here)] = part
    return framed


def sample_mask(mask: Mask, window: Window, height: int, width: int) -> Mask:
    """The part of a mask or of masks in a window, at that size: each pixel is the one that its middle falls on."""
    rows = _nearest(window.top, window.height, height, mask.shape[-2])
    columns = _nearest(window.left, window.width, width, mask.shape[-1])
    return mask.take(rows, -2).take(columns, -1)


def warp_image(image: Image, mapping: Map, height: int, width: int, fill: Fill = 0) -> Image:
    """The image moved by `mapping` into one of that size, interpolated; what nothing covers is filled."""
    rows, columns = image.shape[-3:-1]
    # Single pixels are looked up, so what shrinks to less than half is averaged before.
    share = min(1.0, 2 * math.sqrt(abs(np.linalg.det(mapping[:, :2]))), _LONGEST / max(rows, columns))
    if share < 1:
        image = resize_image(image, max(1, int(rows * share)), max(1, int(columns * share)))
        mapping = compose(mapping, Window(0, 0, *image.shape[-3:-1]).onto(rows, columns))
    border = fill_values(fill, image.shape[-1])
    return _each_frame(image, lambda frame: _warp(frame, mapping, height, width, cv2.INTER_LINEAR, border))


def warp_mask(mask: Mask, mapping: Map, height: int, width: int, fill: int = 0) -> Mask:
    """A mask or masks moved likewise; each pixel takes the value of the nearest."""
    if mask.ndim == 2:
        return _warp(mask, mapping, height, width, cv2.INTER_NEAREST, [fill])
    warped = np.empty((len(mask), height, width), mask.dtype)
    for one, other in zip(mask, warped, strict=True):
        other[:] = _warp(one, mapping, height, width, cv2.INTER_NEAREST, [fill])
    return warped


def mirror_image(image: Image) -> Image:
    """The image with its left and right exchanged."""
    return _each_frame(image, lambda frame: cv2.flip(frame, 1))


def mirror_mask(mask: Mask) -> Mask:
    """The same of a mask or of masks."""
    return np.ascontiguousarray(mask[..., ::-1])


def fill_values(fill: Fill, channels: int) -> list[int]:
    """The value for each channel."""
    values = [fill] if isinstance(fill, int) else list(fill)
    if len(values) not in (1, channels):
        raise DataError(
            f"fill has {len(values)} values but the images have {channels} channels: "
            "give one value, or one for each channel"
        )
    return values * channels if len(values) == 1 else values


def _each_frame(image: Image, change: Callable[[Image], Image]) -> Image:
    """Every frame changed; OpenCV drops a single channel, which is put back."""
    if image.ndim > 3:
        return np.stack([_each_frame(frame, change) for frame in image])
    changed = change(image)
    return changed if changed.ndim == 3 else changed[:, :, None]


def _warp(frame: Image, mapping: Map, height: int, width: int, method: int, border: Sequence[int]) -> Image:
    # OpenCV counts from the middle of the first pixel, we from its corner.
    half = np.array([0.5, 0.5])
    shifted = np.column_stack([mapping[:, :2], mapping[:, :2] @ half + mapping[:, 2] - half])
    warped: Image = cv2.warpAffine(frame, shifted, (width, height), flags=method, borderValue=tuple(border))
    return warped


def _nearest(start: float, extent: float, length: int, limit: int) -> NDArray[np.intp]:
    middles = start + (np.arange(length) + 0.5) * (extent / length)
    return np.clip(middles.astype(np.intp), 0, limit - 1)


def _overlap(
    size: tuple[int, ...], top: int, left: int, height: int, width: int
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Rows and columns that an image and a window share, as the window counts them and as the image does."""
    here, there = [], []
    for start, extent, limit in ((top, height, size[0]), (left, width, size[1])):
        first = min(max(start, 0), limit)
        last = max(min(start + extent, limit), first)
        here.append(slice(first - start, last - start))
        there.append(slice(first, last))
    return (here[0], here[1]), (there[0], there[1])
