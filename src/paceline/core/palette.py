"""Colours that can be told apart, by number."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

Colour = tuple[int, int, int]

BACKGROUND: Colour = (75, 75, 75)
"""What is around the things that are looked for shall not catch the eye."""
_AROUND = {"background", "bg", "void", "unlabeled", "unlabelled"}

_CHOSEN: list[Colour] = [
    (245, 20, 130), (40, 95, 235), (60, 185, 75), (255, 215, 0), (160, 60, 220), (30, 205, 220), (245, 130, 40),
    (180, 240, 60), (250, 165, 205), (0, 128, 128), (150, 90, 40), (20, 30, 130), (125, 130, 20), (150, 245, 190),
    (195, 175, 255), (215, 40, 40),
]  # fmt: skip
_GOLDEN = 0.6180339887498949  # steps of it spread over a circle as evenly as steps can
_TONES = ((0.75, 0.95), (0.85, 0.65), (0.45, 1.0))  # saturation and value, in turn


def colours_of(classes: Sequence[str]) -> list[Colour]:
    """The colours of classes by their numbers, dark grey for a background."""
    return [
        BACKGROUND if name.strip(" _-").lower() in _AROUND else colour_of(number) for number, name in enumerate(classes)
    ]


def colour_of(number: int) -> Colour:
    """The colour of class `number`: the first sixteen are chosen by hand, further ones computed."""
    if number < len(_CHOSEN):
        return _CHOSEN[number]
    saturation, value = _TONES[number % len(_TONES)]
    red, green, blue = colorsys.hsv_to_rgb(number * _GOLDEN % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)
