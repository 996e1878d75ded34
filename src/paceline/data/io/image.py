"""Image files as pixels: simplejpeg decodes JPEG, Pillow every other format; damaged files are refused."""

from __future__ import annotations

import io
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from paceline.core.errors import DamagedFileError, DataError
from paceline.core.regular_file import open_regular

Pixels = NDArray[np.uint8]

FORMATS = ("PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
"""What Pillow may be asked to read, besides JPEG; the content decides, not the file's name."""
MAX_PIXELS = 178_956_970
"""Pixels of the largest image that is decoded: as many as Pillow decodes."""
MAX_BYTES = 1 << 29
"""Bytes of the largest file that is read."""
_MAX_SCANNED = 2_000_000_000  # pixels: a JPEG file may pass over its pixels many times: ten or so are usual
_HEADER_BYTES = 1 << 16  # of a file, in which most JPEG files say their size
_SCAN_BYTES = 10  # of the shortest scan of a JPEG file
_BAND = 1 << 22  # pixels that are converted at a time
DAMAGE = (OSError, ValueError, SyntaxError, EOFError, TypeError, KeyError, IndexError, OverflowError, struct.error)
"""What Pillow raises of damaged files."""
JPEG = b"\xff\xd8\xff"
"""How JPEG files begin."""
# Tags of a TIFF file, whose tiles may be larger than the image.
_WIDTH, _HEIGHT, _ORIENTATION, _TILE_WIDTH, _TILE_HEIGHT = 256, 257, 274, 322, 323
_TURNS = {  # of what lies so, to stand upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pillow warns of half of what it refuses; whatever is above our own bound is refused.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")  # Exif data is often damaged, and images are fine


Header = tuple[int, int, int, bool]
"""Height and width of an image when it is upright, its Exif orientation, and whether simplejpeg decodes it."""


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what decoders raise into a DataError that names the file."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise DamagedFileError(f"{path}: not an image that can be read ({', '.join(('JPEG', *FORMATS))})") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"{path}: more than {MAX_PIXELS:,} pixels; cut it into tiles") from error
    except DataError as error:  # of a sound image of a kind that is not taken
        raise DataError(f"{path}: {error}") from error
    except DAMAGE as error:
        raise DamagedFileError(f"{path}: damaged or truncated image ({error})") from error


@contextmanager
def open_named(path: Path) -> Iterator[BinaryIO]:
    """A regular file that holds something, open for reading; a DataError that names it if there is none."""
    try:
        with open_regular(path, buffering=0) as file:
            if not os.fstat(file.fileno()).st_size:
                raise DamagedFileError(f"{path}: the file is empty (0 bytes)")
            yield file
    except FileNotFoundError as error:
        raise DamagedFileError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path!s}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def read_bytes(path: Path) -> bytes:
    """The content of a regular file of a bearable size."""
    with open_named(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise DataError(f"{path}: {size:,} bytes; an image file has at most {MAX_BYTES:,}")
        return file.read()


def _check_size(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise DataError(f"{width}×{height} is more than {MAX_PIXELS:,} pixels; cut it into tiles")


def _jpeg_header(data: bytes) -> Header:
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        if "subsampling" not in str(error):
            raise
        return _other_header(data)  # rare, but valid for other decoders
    _check_size(height, width)
    # Counting takes a twentieth of the time of decoding; a file this short cannot hold too many.
    scans = data.count(b"\xff\xda") if len(data) // _SCAN_BYTES * height * width > _MAX_SCANNED else 1
    if scans * height * width > _MAX_SCANNED:
        raise DataError(f"{width}×{height} pixels in {scans} scans would take too long to decode")
    orientation = _jpeg_orientation(data)
    if orientation >= 5:  # lies on its side
        height, width = width, height
    return height, width, orientation, colors not in ("CMYK", "YCCK")


def _jpeg_orientation(data: bytes) -> int:
    """The Exif orientation of a JPEG file. Pillow is asked only if there is any Exif data before the pixels."""
    start_of_scan = data.find(b"\xff\xda")
    if data.find(b"Exif\0\0", 0, start_of_scan) == -1:
        return 1
    try:
        return _exif_orientation(JpegImageFile(io.BytesIO(data)), data)
    except DAMAGE:  # of parts that other decoders pass over
        return 1


def _exif_orientation(image: Image.Image, data: bytes) -> int:
    """The Exif orientation of an open image, 1 to 8; 1, upright, if none or damaged. XMP is not asked."""
    tags = Image.Exif()
    try:
        if image.format == "PNG" and "exif" not in image.info and b"eXIf" in data:
            image.load()  # it may come behind the pixels
        tags.load(image.info.get("exif", b""))
        orientation = tags.get(_ORIENTATION)
    except DAMAGE:
        return 1
    return int(orientation) if orientation in _TURNS else 1


def turn_upright(image: Image.Image, orientation: int) -> Image.Image:
    """The image of a file, decoded, as it lies by that Exif orientation; XMP is not asked."""
    image.info.pop("xmp", None)  # Pillow turns TIFF files itself, and would ask it
    image.load()
    return image if image.format == "TIFF" or orientation == 1 else image.transpose(_TURNS[orientation])


def _other_header(data: bytes) -> Header:
    with _opened(data) as opened:
        tags = getattr(opened, "tag_v2", {})  # of a TIFF file, whose size Pillow has upright already, or has not
        height, width = int(tags.get(_HEIGHT, opened.height)), int(tags.get(_WIDTH, opened.width))
        found = tags.get(_ORIENTATION) if tags else _exif_orientation(opened, data)
        orientation = int(found) if found in _TURNS else 1
        return (height, width, orientation, False) if orientation < 5 else (width, height, orientation, False)


def _opened(data: bytes) -> Image.Image:
    """The image with nothing but its header read, if it is not too large."""
    opened = Image.open(io.BytesIO(data), formats=("JPEG",) if data.startswith(JPEG) else FORMATS)
    _check_size(opened.height, opened.width)
    tags = getattr(opened, "tag_v2", {})
    _check_size(int(tags.get(_TILE_HEIGHT, 0)), int(tags.get(_TILE_WIDTH, 0)))
    return opened


def _as_rgb(image: Image.Image) -> Pixels:
    """A band at a time, so that little memory is needed beside the image itself."""
    if image.mode == "F":
        raise DataError("pixels are floating-point numbers, which have no fixed range; save it with 8 or 16 bits")
    convert = _from_deep_gray if image.mode.startswith("I") else _over_white
    rows = max(1, _BAND // max(1, image.width))
    if rows >= image.height:
        return convert(image)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        pixels[top:bottom] = convert(image.crop((0, top, image.width, bottom)))
    return pixels


def _over_white(image: Image.Image) -> Pixels:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return np.array(image.convert("RGB"))


def _from_deep_gray(image: Image.Image) -> Pixels:
    values: NDArray[np.integer[Any]] = np.asarray(image)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise DataError("pixels have more than 16 bits; save it with 8 or 16 bits")
    gray = (values >> 8).astype(np.uint8)
    return np.repeat(gray[:, :, None], 3, axis=2)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The bytes of an image file, with its header understood."""

    path: Path
    data: bytes
    height: int
    """Of the whole image, upright, in pixels; so is the width."""
    width: int
    orientation: int
    by_simplejpeg: bool

    @classmethod
    def read(cls, path: Path) -> Encoded:
        """The file's bytes; a file that is missing, too large or no image is a DataError."""
        data = read_bytes(path)
        with _naming(path):
            read = _jpeg_header if data.startswith(JPEG) else _other_header
            return cls(path, data, *read(data))

    @property
    def is_gray(self) -> bool:
        """Whether the file has one channel, which `decode` repeats to three."""
        with _naming(self.path):
            return Image.open(io.BytesIO(self.data)).mode in ("1", "L", "LA", "I", "I;16")

    def decode(self, min_height: int = 0, min_width: int = 0) -> Pixels:
        """RGB pixels, uint8 [H, W, 3], upright as the Exif orientation says; a damaged file is a DataError.

        Gray becomes three equal channels, 16 bits become 8, what is transparent is laid over white, an animation gives
        its first frame. A larger JPEG may come out reduced to not less than the given size, which is faster.
        """
        with _naming(self.path):
            if self.by_simplejpeg:
                return self._decode_jpeg(min_height, min_width)
            with _opened(self.data) as opened:
                return _as_rgb(turn_upright(opened, self.orientation))

    def _decode_jpeg(self, min_height: int, min_width: int) -> Pixels:
        height, width = self.height, self.width
        for divisor in (8, 4, 2):  # other shares take longer than the whole image
            reduced = -(-self.height // divisor), -(-self.width // divisor)
            if (min_height, min_width) > (0, 0) and reduced[0] >= min_height and reduced[1] >= min_width:
                height, width = reduced
                break
        if self.orientation >= 5:
            height, width = width, height
        pixels: Pixels = simplejpeg.decode_jpeg(self.data, min_height=height, min_width=width)
        if self.orientation == 1:
            return pixels
        return np.array(Image.fromarray(pixels).transpose(_TURNS[self.orientation]))


def read_size(path: Path) -> tuple[int, int]:
    """Height and width of the image in a file, upright; of a JPEG file its beginning is read, if that tells."""
    with open_named(path) as file:
        data = file.read(_HEADER_BYTES)
    if data.startswith(JPEG):
        with suppress(DataError, *DAMAGE):
            return _jpeg_header(data)[:2]
    image = Encoded.read(path)
    return image.height, image.width


EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
"""The extensions of image files."""
