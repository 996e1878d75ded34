"""Crop, resize, warp and flip: images and masks as arrays, and samples with everything that lies on their image.

An image is uint8 or float32 [H, W, C], a clip [T, H, W, C]; a mask is uint8 [H, W], masks of objects [K, H, W].
Results may share memory with what is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.argument_types import Fill, Size
from paceline.data.batch import Image, Sample
from paceline.data.io.image import Encoded
from paceline.data.transforms.annotations import (
    AffineMatrix,
    CropBox,
    Pairs,
    compose_affine,
    flip_boxes,
    flip_keypoints,
    transform_annotations,
)

Draws = NDArray[np.float64]
"""The random numbers that a transform gets for a sample, uniform in [0, 1)."""
Mask = NDArray[np.uint8]

_MAX_SIDE = 32_766  # pixels that OpenCV can warp


def size_of(sample: Sample) -> tuple[int, int]:
    """Height and width of a sample's image, whether it is decoded or not."""
    image = sample["image"]
    if isinstance(image, np.ndarray):
        return image.shape[-3], image.shape[-2]
    return image.height, image.width


def height_and_width(size: Size) -> tuple[int, int]:
    """Both sides; of one number, a square."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def center_offset(length: int, wanted: int) -> int:
    """Where a centered stretch begins, rounded as torchvision does; below 0 if it is longer."""
    return round((length - wanted) / 2) if length >= wanted else -((wanted - length) // 2)


def between(draw: float, low: float, high: float) -> float:
    """A number from `low` to `high` for a draw from 0 to 1."""
    return low + (high - low) * float(draw)


def channel_axis(images: Tensor) -> int:
    """The axis of channels in a batch of images or clips [N, C, …], or of several views of each [N, V, C, T, H, W]."""
    return 1 if images.ndim < 6 else 2


def crop(sample: Sample, box: CropBox, fill: Fill = 0, mask_fill: int = 0, min_visible: float | None = None) -> Sample:
    """The part of a sample in a box of whole pixels; what lies beyond the image is filled."""
    image = crop_image(sample["image"], box, fill)
    matrix = box.matrix_to(*image.shape[-3:-1])
    return _changed(sample, image, lambda mask, value: crop_mask(mask, box, value), mask_fill, matrix, min_visible)


def resized_crop(sample: Sample, box: CropBox, height: int, width: int, min_visible: float | None = None) -> Sample:
    """The part of a sample in a box of whole pixels inside the image, resized.

    An encoded image is decoded at the smallest scale that suffices. The box is then widened, by less than one of the
    decoded pixels, to where those begin and end.
    """
    image = sample["image"]
    if isinstance(image, np.ndarray):
        part = crop_image(image, box)
    else:
        part, box = _decode_part(image, box, height, width)
    resized, matrix = resize_image(part, height, width), box.matrix_to(height, width)
    return _changed(sample, resized, lambda mask, _: resize_mask(mask, box, height, width), 0, matrix, min_visible)


def warp_affine(
    sample: Sample,
    matrix: AffineMatrix,
    size: tuple[int, int],
    fill: Fill = 0,
    mask_fill: int = 0,
    min_visible: float | None = None,
) -> Sample:
    """The sample moved by `matrix` into an image of that height and width; what nothing covers is filled."""
    image = warp_image(sample["image"], matrix, *size, fill)
    return _changed(
        sample, image, lambda mask, value: warp_mask(mask, matrix, *size, value), mask_fill, matrix, min_visible
    )


def horizontal_flip(sample: Sample, pairs: Pairs) -> Sample:
    """The sample flipped horizontally; `pairs` are the keypoints that are left and right of a kind."""
    width = size_of(sample)[1]
    flipped = {**sample, "image": _each_frame(sample["image"], lambda frame: cv2.flip(frame, 1))}
    flipped |= {name: np.ascontiguousarray(sample[name][..., ::-1]) for name in ("mask", "masks") if name in sample}
    if "boxes" in sample:
        flipped["boxes"] = flip_boxes(sample["boxes"], width)
    if "keypoints" in sample:
        flipped["keypoints"] = flip_keypoints(sample["keypoints"], width, pairs)
    if "matrix" in sample:
        back = np.array([[-1.0, 0, width], [0, 1, 0]])
        flipped["matrix"] = compose_affine(sample["matrix"], back).astype(np.float32)
    return flipped


def _changed(
    sample: Sample,
    image: Image,
    change_mask: Callable[[Mask, int], Mask],
    mask_fill: int,
    matrix: AffineMatrix,
    min_visible: float | None,
) -> Sample:
    """The sample with a new image, and everything else moved as that was; `change_mask` is given what to fill with."""
    changed = {**sample, "image": image}
    if "mask" in sample:
        changed["mask"] = change_mask(sample["mask"], mask_fill)
    masks = change_mask(sample["masks"], 0) if "masks" in sample else None
    return transform_annotations(changed, matrix, size_of(changed), masks, min_visible)


def crop_image(image: Image, box: CropBox, fill: Fill = 0) -> Image:
    """The part of an image in a box of whole pixels; what lies beyond the image is filled."""
    top, left, height, width = (int(bound) for bound in box)
    here, there = _overlap(image.shape[-3:-1], top, left, height, width)
    part = image[(..., *there, slice(None))]
    if part.shape[-3:-1] == (height, width):
        return part
    channels = image.shape[-1]
    row = np.empty((width, channels), image.dtype)
    row[:] = fill_values(fill, channels)
    padded = np.empty((*image.shape[:-3], height, width, channels), image.dtype)
    padded[...] = row  # rows are copied much faster than pixels are set
    padded[(..., *here, slice(None))] = part
    return padded


def crop_mask(mask: Mask, box: CropBox, fill: int = 0) -> Mask:
    """The same of a mask [H, W] or of masks [K, H, W]."""
    return crop_image(mask[..., None], box, fill)[..., 0]


def resize_image(image: Image, height: int, width: int) -> Image:
    """An image or a clip at that size: interpolated, and averaged (antialiased) along sides that shrink."""
    rows, columns = image.shape[-3:-1]
    if (rows, columns) == (height, width):
        return image
    if image.ndim > 4:  # several views of a video
        return np.stack([resize_image(view, height, width) for view in image])
    if image.ndim == 4 or height < rows or width < columns:
        return _antialiased(image, height, width)
    return _each_frame(image, lambda frame: cv2.resize(frame, (width, height), interpolation=cv2.INTER_LINEAR))


def resize_mask(mask: Mask, box: CropBox, height: int, width: int) -> Mask:
    """The part of a mask or of masks in a box, at that size: each pixel is the one that its center falls on."""
    rows = _nearest(box.top, box.height, height, mask.shape[-2])
    columns = _nearest(box.left, box.width, width, mask.shape[-1])
    return mask.take(rows, -2).take(columns, -1)


def warp_image(image: Image, matrix: AffineMatrix, height: int, width: int, fill: Fill = 0) -> Image:
    """The image moved by `matrix` into one of that size, interpolated; what nothing covers is filled."""
    rows, columns = image.shape[-3:-1]
    # Single pixels are looked up, so what shrinks to less than half is averaged before.
    share = min(1.0, 2 * math.sqrt(abs(np.linalg.det(matrix[:, :2]))), _MAX_SIDE / max(rows, columns))
    if share < 1:
        image = resize_image(image, max(1, int(rows * share)), max(1, int(columns * share)))
        matrix = compose_affine(matrix, CropBox(0, 0, *image.shape[-3:-1]).matrix_to(rows, columns))
    border = fill_values(fill, image.shape[-1])
    return _each_frame(image, lambda frame: _warp(frame, matrix, height, width, cv2.INTER_LINEAR, border))


def warp_mask(mask: Mask, matrix: AffineMatrix, height: int, width: int, fill: int = 0) -> Mask:
    """A mask or masks moved likewise; each pixel takes the value of the nearest."""
    if mask.ndim == 2:
        return _warp(mask, matrix, height, width, cv2.INTER_NEAREST, [fill])
    warped = np.empty((len(mask), height, width), mask.dtype)
    for one, other in zip(mask, warped, strict=True):
        other[:] = _warp(one, matrix, height, width, cv2.INTER_NEAREST, [fill])
    return warped


def fill_values(fill: Fill, channels: int) -> list[int]:
    """The value for each channel."""
    values = [fill] if isinstance(fill, int) else list(fill)
    if len(values) not in (1, channels):
        raise DataError(
            f"fill has {len(values)} values but the images have {channels} channels: "
            "give one value, or one for each channel"
        )
    return values * channels if len(values) == 1 else values


def _antialiased(image: Image, height: int, width: int) -> Image:
    """By torch's kernel, for bytes several times as fast as OpenCV's averaging, in the layout that it works in."""
    frames = torch.from_numpy(np.require(image, requirements=["C", "W"]))
    frames = (frames if image.ndim == 4 else frames.unsqueeze(0)).permute(0, 3, 1, 2)
    resized = F.interpolate(frames, (height, width), mode="bilinear", antialias=True).permute(0, 2, 3, 1)
    result: Image = resized.reshape(*image.shape[:-3], height, width, image.shape[-1]).numpy()
    return result


def _each_frame(image: Image, change: Callable[[Image], Image]) -> Image:
    """Every frame changed; OpenCV drops a single channel, which is put back."""
    if image.ndim > 3:
        return np.stack([_each_frame(frame, change) for frame in image])
    changed = change(image)
    return changed if changed.ndim == 3 else changed[:, :, None]


def _warp(frame: Image, matrix: AffineMatrix, height: int, width: int, method: int, border: Sequence[int]) -> Image:
    # OpenCV counts from the center of the first pixel, we from its corner.
    half = np.array([0.5, 0.5])
    shifted = np.column_stack([matrix[:, :2], matrix[:, :2] @ half + matrix[:, 2] - half])
    warped: Image = cv2.warpAffine(frame, shifted, (width, height), flags=method, borderValue=tuple(border))
    return warped


def _nearest(start: float, extent: float, length: int, limit: int) -> NDArray[np.intp]:
    centers = start + (np.arange(length) + 0.5) * (extent / length)
    return np.clip(centers.astype(np.intp), 0, limit - 1)


def _overlap(
    size: tuple[int, ...], top: int, left: int, height: int, width: int
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Rows and columns that an image and a box share, as the box counts them and as the image does."""
    here, there = [], []
    for start, extent, limit in ((top, height, size[0]), (left, width, size[1])):
        first = min(max(start, 0), limit)
        last = max(min(start + extent, limit), first)
        here.append(slice(first - start, last - start))
        there.append(slice(first, last))
    return (here[0], here[1]), (there[0], there[1])


def _decode_part(encoded: Encoded, box: CropBox, height: int, width: int) -> tuple[Image, CropBox]:
    """The pixels in a box, not fewer than `height` and `width` if the image has them, and the box they fill."""
    rows, columns = encoded.height, encoded.width
    wanted = math.ceil(height * rows / box.height), math.ceil(width * columns / box.width)
    pixels: Image = encoded.decode(min_height=wanted[0], min_width=wanted[1])
    factor = 2 ** round(math.log2(max(rows / pixels.shape[0], columns / pixels.shape[1])))
    top, left = int(box.top / factor), int(box.left / factor)
    bottom, right = math.ceil((box.top + box.height) / factor), math.ceil((box.left + box.width) / factor)
    part = pixels[top:bottom, left:right]
    return part, CropBox(top * factor, left * factor, part.shape[0] * factor, part.shape[1] * factor)
