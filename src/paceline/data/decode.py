"""Image files as pixels: JPEG by simplejpeg, the other formats by Pillow, and nothing that is damaged."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from paceline.core.errors import DataError

Pixels = NDArray[np.uint8]

FORMATS = ("PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
"""What Pillow may be asked to read, besides JPEG; the content decides, not the file's name."""
_EXIF_BYTES = 1 << 16  # a segment of a JPEG file, which is what Exif data has to fit into
_DAMAGE = (OSError, ValueError, SyntaxError, EOFError, TypeError, KeyError, IndexError, struct.error)


def decode_image(path: Path, max_pixels: int = 178_956_970, min_size: tuple[int, int] | None = None) -> Pixels:
    """The image in a file as RGB, uint8 [H, W, 3], upright as its Exif orientation says.

    Grey becomes three equal channels, 16 bits become 8, what is transparent is laid over white, an animation
    gives its first frame. With `min_size`, a height and width, a larger JPEG may come out reduced to not less
    than that, which is faster. A file that is missing, damaged, too large or no image is a DataError.
    """
    data = _read(path)
    try:
        if data.startswith(b"\xff\xd8\xff"):
            return _decode_jpeg(data, max_pixels, min_size)
        return _decode_other(data, FORMATS, max_pixels)
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: not an image that can be read ({', '.join(('JPEG', *FORMATS))})") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"{path}: more than {max_pixels:,} pixels") from error
    except _RefusedError as error:
        raise DataError(f"{path}: {error}") from error
    except _DAMAGE as error:
        raise DataError(f"{path}: damaged or truncated image ({error})") from error


class _RefusedError(Exception):
    """A sound image of a kind that is not taken."""


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not data:
        raise DataError(f"{path}: the file is empty (0 bytes)")
    return data


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise _RefusedError(f"{width}×{height} is more than {max_pixels:,} pixels")


def _decode_jpeg(data: bytes, max_pixels: int, min_size: tuple[int, int] | None) -> Pixels:
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        if "subsampling" not in str(error):
            raise
        return _decode_other(data, ("JPEG",), max_pixels)  # rare, but valid for other decoders
    _check_size(height, width, max_pixels)
    if colours in ("CMYK", "YCCK"):
        return _decode_other(data, ("JPEG",), max_pixels)
    orientation = _orientation(data)
    min_height, min_width = min_size or (0, 0)
    if orientation >= 5:  # lies on its side
        min_height, min_width = min_width, min_height
    pixels: Pixels = simplejpeg.decode_jpeg(data, min_height=min_height, min_width=min_width)
    return _upright(pixels, orientation)


def _orientation(data: bytes) -> int:
    """The Exif orientation of a JPEG file, 1 to 8; 1, upright, where there is none."""
    start = data.find(b"Exif\0\0", 0, 2 * _EXIF_BYTES) + 6
    if start < 6:
        return 1
    tags = data[start : start + _EXIF_BYTES]
    order = "<" if tags.startswith(b"II") else ">"
    try:
        (directory,) = struct.unpack_from(order + "I", tags, 4)
        (count,) = struct.unpack_from(order + "H", tags, directory)
        for entry in range(directory + 2, directory + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tags, entry)
            if (tag, kind) == (0x0112, 3):
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass  # a note that cannot be read turns nothing
    return 1


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _decode_other(data: bytes, formats: tuple[str, ...], max_pixels: int) -> Pixels:
    with Image.open(io.BytesIO(data), formats=formats) as opened:
        _check_size(opened.height, opened.width, max_pixels)
        opened.load()
        return _as_rgb(ImageOps.exif_transpose(opened))


def _as_rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I"):
        return _from_deep_grey(np.asarray(image))
    if image.mode == "F":
        raise _RefusedError("pixels are floating-point numbers, which have no fixed range; save it with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return np.array(image.convert("RGB"))


def _from_deep_grey(values: NDArray[np.integer[Any]]) -> Pixels:
    if values.min() < 0 or values.max() > 0xFFFF:
        raise _RefusedError("pixels have more than 16 bits; save it with 8 or 16 bits")
    grey = (values >> 8).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)
