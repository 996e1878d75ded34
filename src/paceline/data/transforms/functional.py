"""What transforms of samples are made of: an image, its mask and its objects changed together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.core.errors import DataError
from paceline.data.argument_types import Fill
from paceline.data.batch import Sample
from paceline.data.io.image import Encoded
from paceline.data.sample_types import Image
from paceline.data.transforms.coordinates import (
    Map,
    Window,
    compose,
    mirror_boxes,
    mirror_keypoints,
    place_objects,
    size_of,
)
from paceline.data.transforms.pixels import (
    frame_image,
    frame_mask,
    mirror_image,
    mirror_mask,
    sample_mask,
    warp_image,
    warp_mask,
)
from paceline.data.transforms.resizing import resize_image


def frame(
    sample: Sample, window: Window, fill: Fill = 0, mask_fill: int = 0, min_visible: float | None = None
) -> Sample:
    """What a window of whole pixels shows of a sample; what lies beyond the image is filled."""
    framed = {**sample, "image": frame_image(sample["image"], window, fill)}
    if "mask" in sample:
        framed["mask"] = frame_mask(sample["mask"], window, mask_fill)
    masks = frame_mask(sample["masks"], window) if "masks" in sample else None
    height, width = size_of(framed)
    return place_objects(framed, window.onto(height, width), height, width, masks, min_visible)


def resize(sample: Sample, window: Window, height: int, width: int, min_visible: float | None = None) -> Sample:
    """What a window of whole pixels inside the image shows, brought to that size.

    An image that is not decoded yet is decoded as small as it may be for this. Then the window is widened, by less
    than one of the pixels that are decoded, to where those begin and end.
    """
    image = sample["image"]
    if isinstance(image, np.ndarray):
        part = frame_image(image, window)
    else:
        part, window = _decode_part(image, window, height, width)
    resized = {**sample, "image": resize_image(part, height, width)}
    if "mask" in sample:
        resized["mask"] = sample_mask(sample["mask"], window, height, width)
    masks = sample_mask(sample["masks"], window, height, width) if "masks" in sample else None
    return place_objects(resized, window.onto(height, width), height, width, masks, min_visible)


def warp(
    sample: Sample,
    mapping: Map,
    height: int,
    width: int,
    fill: Fill = 0,
    mask_fill: int = 0,
    min_visible: float | None = None,
) -> Sample:
    """The sample moved by `mapping` into an image of that size; what nothing covers is filled."""
    warped = {**sample, "image": warp_image(sample["image"], mapping, height, width, fill)}
    if "mask" in sample:
        warped["mask"] = warp_mask(sample["mask"], mapping, height, width, mask_fill)
    masks = warp_mask(sample["masks"], mapping, height, width) if "masks" in sample else None
    return place_objects(warped, mapping, height, width, masks, min_visible)


def mirror(sample: Sample, pairs: Sequence[Sequence[int]] | None) -> Sample:
    """The sample with its left and right exchanged; `pairs` are the keypoints that are left and right of a kind."""
    width = size_of(sample)[1]
    mirrored = {**sample, "image": mirror_image(sample["image"])}
    mirrored |= {name: mirror_mask(sample[name]) for name in ("mask", "masks") if name in sample}
    if "boxes" in sample:
        mirrored["boxes"] = mirror_boxes(sample["boxes"], width)
    if "keypoints" in sample:
        if pairs is None:
            raise DataError(
                "the data set does not say which keypoints are left and right of a kind: give it joint pairs"
            )
        mirrored["keypoints"] = mirror_keypoints(sample["keypoints"], width, pairs)
    if "matrix" in sample:
        back = np.array([[-1.0, 0, width], [0, 1, 0]])
        mirrored["matrix"] = compose(sample["matrix"], back).astype(np.float32)
    return mirrored


def _decode_part(encoded: Encoded, window: Window, height: int, width: int) -> tuple[Image, Window]:
    """The pixels in a window, not fewer than `height` and `width` if the image has them, and the window they fill."""
    rows, columns = encoded.height, encoded.width
    wanted = math.ceil(height * rows / window.height), math.ceil(width * columns / window.width)
    pixels: Image = encoded.decode(min_height=wanted[0], min_width=wanted[1])
    factor = 2 ** round(math.log2(max(rows / pixels.shape[0], columns / pixels.shape[1])))
    top, left = int(window.top / factor), int(window.left / factor)
    bottom, right = math.ceil((window.top + window.height) / factor), math.ceil((window.left + window.width) / factor)
    part = pixels[top:bottom, left:right]
    return part, Window(top * factor, left * factor, part.shape[0] * factor, part.shape[1] * factor)
