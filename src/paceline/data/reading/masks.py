"""Masks as the numbers that are stored in their files, never as the colours that these may stand for."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from paceline.core.errors import DataError
from paceline.data.reading.decode import MAX_PIXELS, Pixels, decode_bytes, read_bytes, read_header

MASK_EXTENSIONS = (".png", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".pbm", ".jpg", ".jpeg")
"""How the names of mask files end."""
_FORMATS = ("PNG", "BMP", "GIF", "TIFF", "PPM")
_DAMAGE = (OSError, ValueError, SyntaxError, EOFError, TypeError, KeyError, IndexError, OverflowError, struct.error)
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_SPREAD = {2: 85, 4: 17}  # what Pillow multiplies grey of few bits with


def decode_ids(path: Path, max_pixels: int = MAX_PIXELS) -> Pixels:
    """A mask of class ids, uint8 [H, W], as stored: the indices of a palette, or grey values whatever their bits.

    Colours, 16 bits and JPEG, which does not keep numbers as they are, are a DataError, as is a damaged file.
    """
    data = read_bytes(path)
    if data.startswith(_JPEG):
        raise DataError(f"{path}: a JPEG file, which does not keep class ids exactly; save masks as PNG")
    image = _load(path, data, max_pixels)
    if image.mode not in ("1", "L", "P"):
        expected = "expected one id a pixel, 8-bit grey or a palette"
        raise DataError(f"{path}: {_described(image.mode)}, not a mask of class ids; {expected}")
    ids = np.array(image, np.uint8)
    if data.startswith(_PNG) and image.mode == "L" and data[24] in _SPREAD:
        ids //= _SPREAD[data[24]]
    return ids


def decode_grey(path: Path, max_pixels: int = MAX_PIXELS) -> Pixels:
    """A mask of how much a pixel belongs to the object, uint8 [H, W] from 0 to 255, from any 8-bit image of greys.

    Colours are a DataError, as they stand for classes; those of a JPEG file, which blurs them, are turned into grey.
    """
    data = read_bytes(path)
    if data.startswith(_JPEG):
        pixels = decode_bytes(path, data, read_header(path, data, max_pixels), max_pixels, (0, 0))
        return np.array(Image.fromarray(pixels).convert("L"))
    image = _load(path, data, max_pixels)
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{path}: {_described(image.mode)}; save masks with 8 bits, from 0 to 255")
    if image.mode not in ("1", "L", "LA"):
        _refuse_colours(path, np.array(image.convert("RGB")))
    return np.array(image.convert("L"))


def _refuse_colours(path: Path, pixels: Pixels) -> None:
    is_grey = (pixels == pixels[..., :1]).all(2)
    if not is_grey.all():
        row, column = np.argwhere(~is_grey)[0]
        found = f"pixel ({column}, {row}) has the colour {tuple(pixels[row, column].tolist())}"
        raise DataError(f"{path}: {found}; a binary mask is grey, from 0 to 255: save it so")


def _load(path: Path, data: bytes, max_pixels: int) -> Image.Image:
    read_header(path, data, max_pixels)  # refuses what is too large, before memory is taken for it
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
    except _DAMAGE as error:
        raise DataError(
            f"{path}: damaged or truncated, or no mask ({error}); expected {', '.join(_FORMATS)}"
        ) from error
    return image


def _described(mode: str) -> str:
    if mode.startswith("I"):
        return "16 bits or more a pixel"
    if mode == "F":
        return "floating-point numbers"
    return "grey with transparency" if mode == "LA" else f"colours ({mode})"
