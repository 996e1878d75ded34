"""Text in pictures: the one font there is, and text made to fit."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

    Font = FreeTypeFont | ImageFont


@cache
def font_of_size(size: int) -> Font:
    """Pillow's own font, which has the letters of ASCII and little else."""
    from PIL import ImageFont

    return ImageFont.load_default(size)


def longest(texts: Sequence[str], font: Font) -> int:
    """The width of the widest text, in pixels."""
    return max((round(font.getlength(text)) for text in texts), default=0)


def drawable(text: str) -> str:
    """The text in letters that the font has: without accents, and "?" for what is left over."""
    letters = unicodedata.normalize("NFKD", text.replace("×", "x").replace("–", "-").replace("−", "-"))
    return "".join(letter if letter.isascii() else "?" for letter in letters if not unicodedata.combining(letter))


def cut(text: str, font: Font, room: int) -> str:
    """The text as far as there is room, with three dots where it was cut."""
    text = drawable(text)
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "…") > room:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap(text: str, font: Font, room: int) -> list[str]:
    """The text on one line or two, the second cut if need be."""
    words = text.split()
    for count in range(len(words), 0, -1):
        first = " ".join(words[:count])
        if font.getlength(drawable(first)) <= room or count == 1:
            rest = " ".join(words[count:])
            return [cut(line, font, room) for line in (first, rest) if line]
    return []
