"""Draw masks, boxes and keypoints over an image.

torchvision's functions draw keypoints in one color, need one boolean mask per class, and take 1.3 s to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
from numpy.typing import NDArray

from paceline.visualize.colors import CENTER, LEFT, RIGHT, Color
from paceline.visualize.image import Image, load_font, text_width, truncate

_ALPHA = 0.55  # of a mask's color
_RADIUS, _LINE_WIDTH, _TEXT_SIZE = 3, 2, 10


def draw_label_map(image: Image, label_map: NDArray[Any], colors: Sequence[Color]) -> Image:
    """Blend the color of each pixel's class id over an image; ids beyond the colors leave it unchanged."""
    ids = np.minimum(_resize(label_map, image).astype(np.int64), len(colors))
    return _blend(image, np.array([*colors, (0, 0, 0)])[ids], np.where(ids < len(colors), _ALPHA, 0.0))


def draw_mask(image: Image, mask: NDArray[Any], color: Color) -> Image:
    """Blend a color over an image with a mask from 0 to 1 as its opacity, and outline the mask."""
    values = _resize(mask, image)
    blended, inside = _blend(image, np.array(color), values * _ALPHA), np.pad(values > 0.5, 1)
    interior = inside[:-2, 1:-1] & inside[2:, 1:-1] & inside[1:-1, :-2] & inside[1:-1, 2:]
    blended[inside[1:-1, 1:-1] & ~interior] = color
    return blended


def draw_instances(image: Image, masks: NDArray[Any], colors: Sequence[Color]) -> Image:
    """Blend the color of each mask [K, H, W] over an image, the first ones on top, and outline them."""
    count = len(colors)
    ids = np.full(image.shape[:2], count)
    for number in reversed(range(count)):
        ids[_resize(masks[number], image) > 0] = number
    around = np.pad(ids, 1, mode="edge")
    neighbors = (around[:-2, 1:-1], around[2:, 1:-1], around[1:-1, :-2], around[1:-1, 2:])
    is_edge = (ids < count) & np.any([each != ids for each in neighbors], 0)
    blended = draw_label_map(image, ids, colors)
    blended[is_edge] = np.array([*colors, (0, 0, 0)], np.uint8)[ids[is_edge]]
    return blended


def draw_boxes(
    image: Image, boxes: NDArray[Any], colors: Sequence[Color], widths: Sequence[int] = (), labels: Sequence[str] = ()
) -> Image:
    """Draw boxes [K, 4], given as x1, y1, x2, y2 in pixels of the image, the first ones on top, and their labels.

    Lines are 2 pixels wide by default, and more in an image of more than 800 pixels, as text is larger there.
    """
    page = PIL.Image.fromarray(image)
    draw = PIL.ImageDraw.Draw(page)
    usual = max(_LINE_WIDTH, max(page.size) // 400)
    drawn = list(zip(boxes, colors, widths or [usual] * len(boxes), labels or [""] * len(boxes), strict=True))[::-1]
    for box, color, width, _ in drawn:
        left, top, right, bottom = (round(float(edge)) for edge in box)
        # Edges lie between pixels: the last pixel inside is the one before the edge.
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=color, width=width)
    for box, color, _, label in drawn:
        if label:
            _draw_tag(draw, page.size, (float(box[0]), float(box[1])), label, color)
    return np.array(page)


def _draw_tag(
    draw: PIL.ImageDraw.ImageDraw, size: tuple[int, int], corner: tuple[float, float], label: str, color: Color
) -> None:
    """Write a label on its color above the upper left corner of a box, or below it where no room is above."""
    font = load_font(max(_TEXT_SIZE, max(size) // 64))
    text = truncate(label, font, size[0] // 2)
    ascent = round(font.getbbox("Mg")[3])
    width, height = text_width([text], font) + 3, ascent + 1
    left = max(0, min(round(corner[0]), size[0] - width))
    top = round(corner[1]) - height if corner[1] >= height else max(0, round(corner[1]))
    draw.rectangle((left, top, left + width - 1, top + height - 1), fill=color)
    is_light = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] > 140
    draw.text((left + 2, top), text, font=font, fill="black" if is_light else "white")


def draw_keypoints(
    image: Image, keypoints: NDArray[Any], names: Sequence[str] = (), skeleton: Sequence[tuple[int, int]] = ()
) -> Image:
    """Draw the keypoints [K, J, 3] of people, as x, y and visibility (0 unlabeled, 1 hidden, 2 visible), and limbs.

    Colors tell left from right by the names; hidden keypoints are hollow.
    """
    page = PIL.Image.fromarray(image)
    draw = PIL.ImageDraw.Draw(page)
    for person in keypoints:
        places, visibility = person[:, :2], person[:, 2]
        labels = names or [""] * len(places)
        for start, end in skeleton:
            if visibility[start] and visibility[end]:
                color = _side_color(f"{labels[start]} {labels[end]}")
                draw.line((*places[start], *places[end]), fill=color, width=_LINE_WIDTH)
        for (x, y), visible, label in zip(places, visibility, labels, strict=True):
            if visible:
                color, corners = _side_color(label), (x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS)
                draw.ellipse(corners, fill=color if visible == 2 else None, outline=color)
    return np.array(page)


def _resize(values: NDArray[Any], image: Image) -> NDArray[Any]:
    """Resize values [h, w] to the image by nearest neighbor: ids cannot be interpolated."""
    rows, columns = (np.arange(new) * old // new for new, old in zip(image.shape[:2], values.shape, strict=True))
    return np.asarray(values[rows[:, None], columns])


def _blend(image: Image, colors: NDArray[Any], alpha: NDArray[Any]) -> Image:
    """Blend colors [..., 3] over an image with opacity alpha [H, W]."""
    weight = alpha[..., None]
    return np.asarray((image * (1 - weight) + colors * weight).round(), np.uint8)


def _side_color(names: str) -> Color:
    """Return the color of a keypoint or a limb by the side in its names."""
    is_left, is_right = "left" in names.lower(), "right" in names.lower()
    return CENTER if is_left == is_right else LEFT if is_left else RIGHT
