"""Image files that are read but not decoded yet, so that who knows what is needed can have less of them decoded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.data.reading.decode import MAX_PIXELS, Header, Pixels, decode_bytes, read_bytes, read_header


@dataclass(frozen=True, slots=True)
class Encoded:
    """The bytes of an image file, with its header understood."""

    path: Path
    data: bytes
    header: Header
    max_pixels: int

    @classmethod
    def read(cls, path: Path, max_pixels: int = MAX_PIXELS) -> Encoded:
        """The file's bytes; a file that is missing, too large or no image is a DataError."""
        data = read_bytes(path)
        return cls(path, data, read_header(path, data, max_pixels), max_pixels)

    @property
    def height(self) -> int:
        """Of the whole image, upright, in pixels."""
        return self.header.height

    @property
    def width(self) -> int:
        """Of the whole image, upright, in pixels."""
        return self.header.width

    def decode(self, min_height: int = 0, min_width: int = 0) -> Pixels:
        """RGB pixels, uint8 [H, W, 3], upright; a JPEG may come reduced to not less than the size that is asked for.

        A damaged file is a DataError.
        """
        return decode_bytes(self.path, self.data, self.header, self.max_pixels, (min_height, min_width))
