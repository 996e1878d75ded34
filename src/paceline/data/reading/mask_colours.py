"""Masks that are painted, a colour for each class, as class ids."""

from __future__ import annotations

from collections.abc import Sequence
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
        table, unknown = _table(self._codes), []
        rows = max(1, _BAND // max(1, image.width))
        for top in range(0, image.height, rows):
            bottom = min(top + rows, image.height)
            codes = packed(image.crop((0, top, image.width, bottom)))
            found = table[codes]
            is_unknown = found == 0
            if is_unknown.any():
                unknown.append(codes[is_unknown])
                found[is_unknown] = (self._ignore_index or 0) + 1
            ids[top:bottom] = found - 1
        if unknown and self._ignore_index is None:
            raise DataError(f"{path}: {_told(np.concatenate(unknown), ids.size)}")
        return ids


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


def _told(unknown: NDArray[np.uint32], num_pixels: int) -> str:
    codes, counts = np.unique(unknown, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:_SHOWN]
    named = [f"{_unpacked(int(codes[at]))} ({100 * int(counts[at]) / num_pixels:.3g} % of the pixels)" for at in most]
    more = f" and {counted(len(codes) - _SHOWN, 'colour')} more" if len(codes) > _SHOWN else ""
    found = f"has {', '.join(named)}{more}, of none of `colours`"
    return f"{found}; add their classes, or set `ignore_index` to leave such pixels out"


def _unpacked(code: int) -> list[int]:
    return [code & 255, code >> 8 & 255, code >> 16]
