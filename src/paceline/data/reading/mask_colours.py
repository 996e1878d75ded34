"""Masks that are painted, a colour for each class, as class ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.core.counting import counted
from paceline.core.errors import DataError
from paceline.data.reading.decode import Pixels

Colours = Sequence[Sequence[int]]
"""Red, green and blue, from 0 to 255, of each class."""

_BAND = 1 << 22  # pixels that are looked up at a time
_SHOWN = 3


class PaintedClasses:
    """Turns colours into ids: the first of `colours` is 0, and one that is none of them is `ignore_index`, if given."""

    def __init__(self, colours: Colours, ignore_index: int | None = None) -> None:
        self._codes = tuple(red | green << 8 | blue << 16 for red, green, blue in colours)
        self._ignore_index = ignore_index

    def ids(self, path: Path, image: Image.Image) -> Pixels:
        """The ids of an image, uint8 [H, W]; a colour of no class is a DataError, unless there is `ignore_index`."""
        ids = np.empty((image.height, image.width), np.uint8)
        has_unknown = False
        for rows, _, found in self._bands(image):
            is_unknown = found == 0
            if is_unknown.any():
                has_unknown = True
                found[is_unknown] = (self._ignore_index or 0) + 1
            ids[rows] = found - 1
        if has_unknown and self._ignore_index is None:
            advice = "add their classes, or set `ignore_index` to leave such pixels out"
            raise DataError(f"{path}: has {self.unknown(image)}; {advice}")
        return ids

    def unknown(self, image: Image.Image) -> str:
        """The commonest colours of an image that are of no class, with their shares; empty if there is none."""
        unknown = np.concatenate([codes[found == 0] for _, codes, found in self._bands(image)])
        codes, counts = np.unique(unknown, return_counts=True)
        if not len(codes):
            return ""
        shares = 100 * counts / (image.height * image.width)
        most = np.argsort(-counts, kind="stable")[:_SHOWN]
        named = [f"{_unpacked(int(codes[at]))} ({shares[at]:.3g} % of the pixels)" for at in most]
        more = f" and {counted(len(codes) - _SHOWN, 'colour')} more" if len(codes) > _SHOWN else ""
        return f"{', '.join(named)}{more}, of none of `colours`"

    def _bands(self, image: Image.Image) -> Iterator[tuple[slice, NDArray[np.uint32], NDArray[np.uint16]]]:
        """Some rows at a time: which, their colours, and of each the id and one more, or 0 if it is of no class."""
        table = _table(self._codes)
        height = max(1, _BAND // max(1, image.width))
        for top in range(0, image.height, height):
            bottom = min(top + height, image.height)
            codes = packed(image.crop((0, top, image.width, bottom)))
            yield slice(top, bottom), codes, table[codes]


def packed(image: Image.Image) -> NDArray[np.uint32]:
    """Each pixel's colour, whatever is transparent, as one number [H, W]: red is its lowest byte, blue its highest."""
    # Three bytes and a fourth that says nothing, read as one number.
    bytes_of = np.array(image.convert("RGBA"))
    codes: NDArray[np.uint32] = bytes_of.view("<u4")[..., 0].astype(np.uint32)
    return codes & np.uint32(0xFFFFFF)


@lru_cache(maxsize=8)
def _table(codes: tuple[int, ...]) -> NDArray[np.uint16]:
    """For each colour the id of its class and one more; 0, which takes no memory until it is touched, for others."""
    table = np.zeros(1 << 24, np.uint16)
    table[list(codes)] = np.arange(1, len(codes) + 1)
    return table


def _unpacked(code: int) -> list[int]:
    return [code & 255, code >> 8 & 255, code >> 16]
