"""Colors of classes, keypoints, text and borders."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

Color = tuple[int, int, int]

TEXT, BORDER = (33, 37, 41), (206, 212, 218)
CORRECT, WRONG = (47, 158, 68), (224, 49, 49)
LEFT, RIGHT, CENTER = (66, 165, 245), (255, 152, 0), (124, 220, 90)
"""Keypoints and limbs on the left of a body, on the right, and on neither side."""

BACKGROUND: Color = (75, 75, 75)
"""Gray: the background stays unobtrusive."""
_BACKGROUND_NAMES = {"background", "bg", "void", "unlabeled"}

_PALETTE: list[Color] = [
    (245, 20, 130), (40, 95, 235), (60, 185, 75), (255, 215, 0), (160, 60, 220), (30, 205, 220), (245, 130, 40),
    (180, 240, 60), (250, 165, 205), (0, 128, 128), (150, 90, 40), (20, 30, 130), (125, 130, 20), (150, 245, 190),
    (195, 175, 255), (215, 40, 40),
]  # fmt: skip
_GOLDEN_RATIO = 0.6180339887498949  # multiples of it spread evenly over the circle of hues
_TONES = ((0.75, 0.95), (0.85, 0.65), (0.45, 1.0))  # saturation and value, in turn


def class_colors(classes: Sequence[str], num_ids: int = 0) -> list[Color]:
    """Return the color of each class, dark gray for a background, and of further ids up to `num_ids`."""
    named = [
        BACKGROUND if name.strip(" _-").lower() in _BACKGROUND_NAMES else class_color(index)
        for index, name in enumerate(classes)
    ]
    return named + [class_color(index) for index in range(len(named), num_ids)]


def class_color(index: int) -> Color:
    """Return the color of a class id: the first sixteen are picked for contrast, the others computed."""
    if index < len(_PALETTE):
        return _PALETTE[index]
    saturation, value = _TONES[index % len(_TONES)]
    red, green, blue = colorsys.hsv_to_rgb(index * _GOLDEN_RATIO % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)
