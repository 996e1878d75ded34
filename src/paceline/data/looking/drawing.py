"""A sample as a picture for people: its frames side by side, and what is known of it drawn over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from paceline.core.palette import Colour, colour_of, colours_of
from paceline.core.picture import Picture
from paceline.data.batch import JointNames, Sample

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

LEFT, RIGHT, MIDDLE = (66, 165, 245), (255, 152, 0), (124, 220, 90)
"""The colours of joints and limbs of the left side, the right side, and neither."""

_TINT = 0.55  # of the colour of a mask
_FRAMES = 4  # of a clip that are shown
_GAP = 2  # pixels between them


def draw_sample(sample: Sample, side: int, classes: Sequence[str], joints: JointNames | None = None) -> Picture:
    """The sample's picture, its longer side not above `side`, with masks, boxes and joints drawn on it.

    A single class is that of a mask of shades from 0 to 255. Of a clip, four frames are shown, row by row. Small images
    are enlarged by whole factors, so that pixels stay square.
    """
    image = sample["image"]
    if image.ndim > 3:
        return _draw_clip(image.reshape(-1, *image.shape[-3:]), side)
    height, width = image.shape[:2]
    picture = _scaled(_coloured(image), side)
    scale = np.array([picture.shape[1] / width, picture.shape[0] / height])
    if "mask" in sample and len(classes) > 1:
        picture = _tinted(picture, *_class_layer(sample["mask"], classes))
    elif "mask" in sample:
        picture = _with_shape(picture, sample["mask"] / 255, colour_of(0))
    for mask, number in zip(sample.get("masks", ()), sample.get("classes", ()), strict=False):
        picture = _with_shape(picture, mask, colour_of(int(number)))
    return _draw_objects(picture, sample, scale, joints)


def _draw_clip(frames: NDArray[np.uint8], side: int) -> Picture:
    shown = [frames[len(frames) * number // _FRAMES] for number in range(min(_FRAMES, len(frames)))]
    columns = math.ceil(math.sqrt(len(shown)))
    small = [_scaled(_coloured(frame), (side - _GAP * (columns - 1)) // columns) for frame in shown]
    height, width = small[0].shape[:2]
    rows = math.ceil(len(small) / columns)
    page = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), 255, np.uint8)
    for number, frame in enumerate(small):
        top, left = number // columns * (height + _GAP), number % columns * (width + _GAP)
        page[top : top + height, left : left + width] = frame
    return page


def _coloured(image: NDArray[np.uint8]) -> Picture:
    """Three channels, whatever there are: of one or two the first, of more the first three."""
    return np.ascontiguousarray(image[..., :3] if image.shape[-1] >= 3 else image[..., :1].repeat(3, -1))


def _scaled(picture: Picture, side: int) -> Picture:
    height, width = picture.shape[:2]
    factor = side / max(height, width)
    if factor >= 2:
        factor = int(factor)
    size = max(1, round(width * factor)), max(1, round(height * factor))
    way = cv2.INTER_NEAREST if factor > 1 else cv2.INTER_AREA
    scaled: Picture = picture if size == (width, height) else cv2.resize(picture, size, interpolation=way)
    return scaled


def _class_layer(mask: NDArray[np.uint8], classes: Sequence[str]) -> tuple[Picture, NDArray[Any]]:
    """The colour of each pixel and how much of it is laid over the image; none where nothing is known."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(classes)] = colours_of(classes[:256])
    return table[mask], np.where(mask < len(classes), _TINT, 0.0)


def _with_shape(picture: Picture, shares: NDArray[Any], colour: Colour) -> Picture:
    """A shape of one colour [H, W] laid over the picture, with its outline."""
    tinted = _tinted(picture, np.full((*shares.shape, 3), colour, np.uint8), shares * _TINT)
    size = picture.shape[1], picture.shape[0]
    inside = cv2.resize((shares > 0.5).astype(np.uint8), size, interpolation=cv2.INTER_NEAREST)
    outlines, _ = cv2.findContours(inside, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    outlined: Picture = cv2.drawContours(tinted, outlines, -1, colour, 1)
    return outlined


def _tinted(picture: Picture, colours: Picture, shares: NDArray[Any]) -> Picture:
    """The picture with colours [H, W, 3] laid over it, of the size of the sample's image."""
    size = picture.shape[1], picture.shape[0]
    layer = cv2.resize(colours, size, interpolation=cv2.INTER_NEAREST).astype(np.float32)
    weight = cv2.resize(shares.astype(np.float32), size, interpolation=cv2.INTER_NEAREST)[..., None]
    return np.asarray((picture * (1 - weight) + layer * weight).round(), np.uint8)


def _draw_objects(picture: Picture, sample: Sample, scale: NDArray[Any], joints: JointNames | None) -> Picture:
    if "boxes" not in sample and "keypoints" not in sample:
        return picture
    from PIL import Image, ImageDraw

    page = Image.fromarray(picture)
    draw = ImageDraw.Draw(page)
    boxes = sample.get("boxes", np.empty((0, 4)))
    crowd = sample.get("crowd", np.zeros(len(boxes), np.bool_))
    for box, number, is_crowd in zip(boxes, sample.get("classes", np.zeros(len(boxes))), crowd, strict=True):
        _draw_box(draw, box * np.tile(scale, 2), colour_of(int(number)), 1 if is_crowd else 2)
    for person in sample.get("keypoints", ()):
        _draw_joints(draw, person[:, :2] * scale, person[:, 2], joints)
    return np.array(page)


def _draw_box(draw: ImageDraw, box: NDArray[Any], colour: Colour, width: int) -> None:
    """Edges lie between pixels, and the last pixel inside is the one before the edge."""
    left, top, right, bottom = (round(float(each)) for each in box)
    draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour, width=width)


def _draw_joints(draw: ImageDraw, places: NDArray[Any], seen: NDArray[Any], joints: JointNames | None) -> None:
    names = joints.names if joints else [""] * len(places)
    for start, end in joints.limbs if joints else ():
        if seen[start] and seen[end]:
            draw.line((*places[start], *places[end]), fill=_side([names[start], names[end]]), width=2)
    for (x, y), value, name in zip(places, seen, names, strict=True):
        if value:
            fill = _side([name]) if value == 2 else None
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=fill, outline=_side([name]))


def _side(names: Sequence[str]) -> Colour:
    """The side of a joint, or of a limb between two; one of them may belong to the middle."""
    text = " ".join(names).lower()
    is_left, is_right = "left" in text, "right" in text
    if is_left == is_right:
        return MIDDLE
    return LEFT if is_left else RIGHT
