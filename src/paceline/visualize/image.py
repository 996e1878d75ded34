"""What all drawing shares: images as arrays, which are converted, resized and saved, and text in them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import numpy.typing as npt
import PIL.Image
import simplejpeg
from PIL import ImageFont

from paceline.core.atomic_write import replace_file

if TYPE_CHECKING:
    from torch import Tensor

Image = npt.NDArray[np.uint8]
"""RGB pixels, [H, W, 3]."""
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def to_image(tensor: Tensor) -> Image:
    """Convert an image [C, H, W] or a clip [C, T, H, W]; its value range is scaled to 0–255."""
    values = tensor.detach().float().cpu()
    low, high = values.min(), values.max()
    scaled = (values - low) / (high - low).clamp(min=1e-6) * 255
    return to_rgb(scaled.round().byte().movedim(0, -1).numpy())


def draw_map(values: Tensor, low: float, high: float) -> Image:
    """Draw values [H, W] or [1, H, W] in color, from `low` (dark) to `high` (bright); others are clipped."""
    plane = values.detach().float().cpu().reshape(values.shape[-2:])
    scaled = ((plane - low) / max(high - low, 1e-6)).clamp(0, 1).mul(255).round().byte().numpy()
    return np.ascontiguousarray(cv2.applyColorMap(scaled, cv2.COLORMAP_VIRIDIS)[..., ::-1])


def to_rgb(pixels: npt.NDArray[np.uint8]) -> Image:
    """Return the first three channels [..., C], or the first one three times if there are fewer."""
    return np.ascontiguousarray(pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., :1].repeat(3, -1))


def fit(image: Image, side: int, shape: tuple[int, ...] | None = None) -> Image:
    """Resize an image to `side` pixels on its longer side, with the aspect ratio of `shape` if given.

    Small images are enlarged by an integer factor, so their pixels stay square and sharp.
    """
    height, width = (shape or image.shape)[:2]
    factor = side / max(height, width)
    if factor >= 2:
        factor = int(factor)
    size = max(1, round(width * factor)), max(1, round(height * factor))
    is_enlarged = min(size[0] / image.shape[1], size[1] / image.shape[0]) >= 2
    method = PIL.Image.Resampling.NEAREST if is_enlarged else PIL.Image.Resampling.LANCZOS
    return np.array(PIL.Image.fromarray(image).resize(size, method))


def save_jpeg(image: Image, path: Path) -> None:
    """Write an image as a JPEG file, atomically, many times as fast as PNG; missing folders are created."""
    content: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=90)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a rename over a file waits for the disk on some file systems
    replace_file(path, content, is_durable=False)


def save_png(image: Image, path: Path) -> None:
    """Write an image as a PNG file, atomically; missing folders are created."""
    content = BytesIO()
    PIL.Image.fromarray(image).save(content, format="PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content.getvalue(), is_durable=False)


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
