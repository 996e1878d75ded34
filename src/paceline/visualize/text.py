"""Text in images: font, truncation and line wrapping."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@cache
def load_font(size: int) -> Font:
    """Return Pillow's built-in font, which covers little more than ASCII."""
    return ImageFont.load_default(size)


def text_width(texts: Sequence[str], font: Font) -> int:
    """Return the width of the widest text in pixels."""
    return max((round(font.getlength(text)) for text in texts), default=0)


def to_ascii(text: str) -> str:
    """Remove accents, and replace other characters that the font lacks by "?"."""
    letters = unicodedata.normalize("NFKD", text.replace("×", "x").replace("–", "-").replace("−", "-"))
    return "".join(letter if letter.isascii() else "?" for letter in letters if not unicodedata.combining(letter))


def truncate(text: str, font: Font, width: int) -> str:
    """Truncate text to `width` pixels with an ellipsis."""
    text = to_ascii(text)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap(text: str, font: Font, width: int) -> list[str]:
    """Wrap text into at most two lines of `width` pixels; the second is truncated."""
    words = text.split()
    for count in range(len(words), 0, -1):
        first = " ".join(words[:count])
        if font.getlength(to_ascii(first)) <= width or count == 1:
            rest = " ".join(words[count:])
            return [truncate(line, font, width) for line in (first, rest) if line]
    return []
