"""Pictures of predictions for every pixel: image, truth and prediction side by side, and what colours mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from paceline.core.lettering import cut, font_of_size
from paceline.core.palette import Colour, colours_of
from paceline.core.picture import Picture, image_grid
from paceline.data.looking.drawing import draw_sample
from paceline.data.transforms.resizing import resize_image

_SIDE = 160  # pixels of a picture in a row
_COLUMNS = 6
_SWATCH, _GAP, _TEXT, _NAME = 12, 6, 12, 150
_INK = (33, 37, 41)
_IGNORED = "ignored, left as it is"


def grey(mask: Tensor) -> Picture:
    """A mask of 0 to 255, [H, W], as a picture."""
    return np.repeat(mask.cpu().numpy().astype(np.uint8)[:, :, None], 3, 2)


def tinted(image: Picture, mask: Tensor, classes: Sequence[str]) -> Picture:
    """An image with its classes laid over it; what belongs to none stays as it is."""
    ids = mask.cpu().numpy().astype(np.uint8)
    # A small one is not enlarged here, so that the page does the same with it as with the image alone.
    return draw_sample({"image": resize_image(image, *ids.shape), "mask": ids}, min(_SIDE, max(ids.shape)), classes)


def shaped(image: Picture, mask: Tensor) -> Picture:
    """An image with the shape of its mask, which may have been cut or resized otherwise."""
    return resize_image(image, *mask.shape)


def side_by_side(rows: Sequence[Sequence[Picture]], captions: Sequence[Sequence[str]]) -> Picture:
    """The pictures of each sample in a row, as many samples beside each other as there is room for."""
    pictures = [picture for row in rows for picture in row]
    texts = [caption for row in captions for caption in row]
    width = len(rows[0])
    columns = max(1, _COLUMNS // width) * width
    return image_grid(pictures, texts, [None] * len(pictures), columns, _SIDE)


def with_legend(picture: Picture, classes: Sequence[str], masks: Sequence[Tensor] = ()) -> Picture:
    """The picture with the colours of the classes, named, below it, and an empty one if `masks` have pixels of none."""
    from PIL import Image, ImageDraw

    entries: list[tuple[str, Colour | None]] = list(zip(classes, colours_of(classes), strict=True))
    if any(bool((mask >= len(classes)).any()) for mask in masks):
        entries.append((_IGNORED, None))
    font, step = font_of_size(_TEXT), _SWATCH + 2 * _GAP + _NAME
    columns = max(1, (picture.shape[1] - _GAP) // step)
    num_rows = -(-len(entries) // columns)
    page = Image.new("RGB", (picture.shape[1], num_rows * (_SWATCH + _GAP) + 2 * _GAP), "white")
    draw = ImageDraw.Draw(page)
    for number, (name, colour) in enumerate(entries):
        left = 2 * _GAP + number % columns * step
        top = _GAP + number // columns * (_SWATCH + _GAP)
        draw.rectangle((left, top, left + _SWATCH, top + _SWATCH), fill=colour, outline=None if colour else _INK)
        draw.text((left + _SWATCH + _GAP, top + _SWATCH / 2), cut(name, font, _NAME), font=font, fill=_INK, anchor="lm")
    return np.concatenate([picture, np.asarray(page)])
