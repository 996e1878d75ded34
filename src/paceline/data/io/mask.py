"""Masks as class ids: the numbers stored in a file, ids mapped from other numbers or colors, or COCO's outlines."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.core.errors import DamagedFileError, DataError
from paceline.core.text import join_first, pluralize
from paceline.data.io.image import DAMAGE, JPEG, Encoded, Pixels, turn_upright

MAX_ID = 65_535
"""The largest id in a mask of 16 bits."""
MASK_EXTENSIONS = (".png", ".bmp", ".gif", ".tif", ".tiff", ".jpg", ".jpeg")
"""How the names of mask files end."""
_FORMATS = ("PNG", "BMP", "GIF", "TIFF")
_PNG = b"\x89PNG\r\n\x1a\n"
_SPREAD = {2: 85, 4: 17}  # what Pillow multiplies gray of few bits with
_BITS, _SHADES, _WHITE_IS_ZERO = 258, 262, 0  # tags of a TIFF file, and a value of the second
_EXPECTED = "one id a pixel, as 8-bit gray or a palette"
_NOT_COVERED = "has run lengths that do not cover its image exactly"
_IN_ALPHA = "its transparency (alpha channel) differs from pixel to pixel, and the mask seems to be in it"


def decode_ids(path: Path, mapped: PaintedClasses | LabelMap | None = None) -> Pixels:
    """A mask of class ids, uint8 [H, W], as stored: the indices of a palette, or gray values whatever their bits.

    With `mapped`, the classes that the colors or ids stand for. Without, colors are a DataError, as are ids above 255.
    So are a damaged file, and what does not keep numbers as they are: JPEG, and grays that are scaled when read.
    """
    encoded = Encoded.read(path)
    data = encoded.data
    if data.startswith(JPEG):
        raise DataError(f"{path}: a JPEG file, which does not keep class ids exactly; save masks as PNG")
    image = _load(encoded)
    is_deep = image.mode.startswith("I")
    if _bits(image, data) > 8 and (isinstance(mapped, PaintedClasses) or not is_deep):
        raise DataError(f"{path}: {_described(image.mode)}; save the mask with {_EXPECTED}")
    if isinstance(mapped, PaintedClasses):
        return mapped.ids(path, image)
    scaled = _scaled(image, data)
    if scaled is not None:
        raise DataError(f"{path}: {scaled}, so its values are not ids as they stand; save it as an 8-bit PNG file")
    if is_deep:
        ids = _from_deep(path, np.array(image), 255 if mapped is None else MAX_ID)
    elif image.mode not in ("1", "L", "P"):
        advice = f"give the color of each class as `colors`, or save the mask with {_EXPECTED}"
        if isinstance(mapped, InstanceIds):
            advice = "save the mask with one id a pixel, as gray of 8 or 16 bits or a palette"
        ids, alpha = _gray_and_alpha(path, image, f", not an id of a class; {advice}")
        if alpha.min() < alpha.max() and (ids[alpha < 255].any() or not ids.any()):
            raise DataError(f"{path}: {_IN_ALPHA}; save it with {_EXPECTED}, without transparency")
    else:
        ids = np.array(image, np.uint8)
        if image.mode == "L" and _bits(image, data) in _SPREAD:
            ids //= _SPREAD[_bits(image, data)]
    return ids.astype(np.uint8) if mapped is None else mapped.ids(path, ids)


def _scaled(image: Image.Image, data: bytes) -> str | None:
    """What keeps the values of a file from being those that Pillow gives, if something does."""
    if image.format == "BMP" and struct.unpack_from("<I", data, 14)[0] >= 40 and data[28] == 16:
        return "a BMP file of 16 bits a pixel, 5 or 6 for each color"
    if image.mode == "L" and getattr(image, "tag_v2", {}).get(_SHADES) == _WHITE_IS_ZERO:
        return "a TIFF file in which 0 is white (WhiteIsZero)"
    return None


def _from_deep(path: Path, values: NDArray[Any], most: int) -> NDArray[Any]:
    """Ids that are stored with more than 8 bits."""
    largest, least = int(values.max()), int(values.min())
    if least < 0 or largest > most:
        found = f"holds the id {largest if largest > most else least}, expected 0 to {most}"
        advice = f"map ids to classes with `label_map`, such as `label_map: {{car: 1-{MAX_ID}}}`"
        raise DataError(f"{path}: {found}{'' if most == MAX_ID else f'; {advice}'}")
    return values.astype(np.uint16)


def _gray_and_alpha(path: Path, image: Image.Image, if_colored: str) -> tuple[Pixels, Pixels]:
    """What is stored as equal red, green and blue, and the alpha channel beside it."""
    pixels = np.array(image.convert("RGBA"))
    colored = _colored(pixels[..., :3])
    if colored is not None:
        raise DataError(f"{path}: {colored}{if_colored}")
    return np.ascontiguousarray(pixels[..., 0]), np.ascontiguousarray(pixels[..., 3])


def decode_gray(path: Path) -> Pixels:
    """A mask of how much a pixel belongs to the object, uint8 [H, W] from 0 to 255, from any 8-bit image of grays.

    White of which only parts can be seen, as programs that cut out objects write it, is a mask by its alpha channel.
    Colors are a DataError, as they stand for classes; those of a JPEG file, which blurs them, are turned into gray.
    """
    encoded = Encoded.read(path)  # refuses what is too large, before memory is taken for it
    if encoded.data.startswith(JPEG):
        return np.array(Image.fromarray(encoded.decode()).convert("L"))
    image = _load(encoded)
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{path}: {_described(image.mode)}; save masks with 8 bits, from 0 to 255")
    if image.mode in ("1", "L") and not image.has_transparency_data:
        return np.array(image.convert("L"))
    if_colored = "; a binary mask is gray, from 0 to 255: save it so, or the alpha channel alone of a cut-out"
    gray, alpha = _gray_and_alpha(path, image, if_colored)
    if alpha.min() == alpha.max() and not (gray == 255).all():
        return gray
    if (gray[alpha > 0] == 255).all():
        return alpha
    if np.array_equal(gray, alpha) or (gray.any() and not gray[alpha < 255].any()):
        return gray
    raise DataError(f"{path}: {_IN_ALPHA}; save it as 8-bit gray, from 0 to 255, without transparency")


def _colored(pixels: Pixels) -> str | None:
    """The first pixel that is not gray, if there is one."""
    is_grey = (pixels == pixels[..., :1]).all(2)
    if is_grey.all():
        return None
    row, column = np.argwhere(~is_grey)[0]
    return f"pixel ({column}, {row}) has the color {pixels[row, column].tolist()}"


def _load(encoded: Encoded) -> Image.Image:
    try:
        return turn_upright(Image.open(io.BytesIO(encoded.data), formats=_FORMATS), encoded.orientation)
    except DAMAGE as error:
        found = f"{encoded.path}: damaged or truncated, or no mask ({error})"
        raise DamagedFileError(f"{found}; expected {', '.join(_FORMATS)}") from error


def _bits(image: Image.Image, data: bytes) -> int:
    """Of a channel in the file; Pillow keeps only the upper 8 where there are several channels."""
    if data.startswith(_PNG):
        return data[24]
    stored = getattr(image, "tag_v2", {}).get(_BITS, 8)
    return int(stored[0] if isinstance(stored, tuple) else stored)


def _described(mode: str) -> str:
    return "floating-point numbers" if mode == "F" else "16 bits or more a channel"


Colors = Sequence[Sequence[int]]
"""Red, green and blue, from 0 to 255, of each class."""

_MAX_COLORS = 3


class PaintedClasses:
    """Turns colors into ids: the first of `colors` is 0, and one that is none of them is `ignore_index`, if given."""

    def __init__(self, colors: Colors, ignore_index: int | None = None) -> None:
        self._codes = tuple(red | green << 8 | blue << 16 for red, green, blue in colors)
        self._ignore_index = ignore_index

    def ids(self, path: Path, image: Image.Image) -> Pixels:
        """The ids of an image, uint8 [H, W]; a color of no class is a DataError, unless there is `ignore_index`."""
        codes = packed(image)
        found = _table(self._codes)[codes]
        is_unknown = found == 0
        if is_unknown.any():
            if self._ignore_index is None:
                advice = "add their classes, or set `ignore_index` to leave such pixels out"
                raise DataError(
                    f"{path}: has {_commonest(codes[is_unknown], codes.size)}, of none of `colors`; {advice}"
                )
            found[is_unknown] = self._ignore_index + 1
        ids: Pixels = (found - 1).astype(np.uint8)
        return ids


def _commonest(codes: NDArray[np.uint32], num_pixels: int) -> str:
    """The commonest colors with their shares of all pixels."""
    colors, counts = np.unique(codes, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:_MAX_COLORS]
    named = [f"{_unpacked(int(colors[at]))} ({100 * counts[at] / num_pixels:.3g} % of the pixels)" for at in most]
    more = f" and {pluralize(len(colors) - _MAX_COLORS, 'color')} more" if len(colors) > _MAX_COLORS else ""
    return ", ".join(named) + more


def packed(image: Image.Image) -> NDArray[np.uint32]:
    """Each pixel's color, whatever is transparent, as one number [H, W]: red is its lowest byte, blue its highest."""
    # Three bytes and a fourth that says nothing, read as one number.
    bytes_of = np.array(image.convert("RGBA"))
    codes: NDArray[np.uint32] = bytes_of.view("<u4")[..., 0].astype(np.uint32)
    return codes & np.uint32(0xFFFFFF)


@lru_cache(maxsize=8)
def _table(codes: tuple[int, ...]) -> NDArray[np.uint16]:
    """For each color the id of its class and one more; 0, which takes no memory until it is touched, for others."""
    table = np.zeros(1 << 24, np.uint16)
    table[list(codes)] = np.arange(1, len(codes) + 1)
    return table


def _unpacked(code: int) -> list[int]:
    return [code & 255, code >> 8 & 255, code >> 16]


class LabelMap:
    """Turns ids into classes: ranges of ids for each class number; any other id is `ignore_index`, if given."""

    def __init__(self, ranges: Mapping[int, Sequence[tuple[int, int]]], ignore_index: int | None) -> None:
        self._classes = np.full(MAX_ID + 1, 0 if ignore_index is None else ignore_index, np.uint8)
        self._is_known = np.full(MAX_ID + 1, ignore_index is not None)
        for number, spans in ranges.items():
            for first, last in spans:
                self._classes[first : last + 1] = number
                self._is_known[first : last + 1] = True

    def ids(self, path: Path, ids: NDArray[Any]) -> Pixels:
        """The classes of ids, uint8 [H, W]; an id of no class is a DataError, unless there is `ignore_index`."""
        if not self._is_known[ids].all():
            present = np.unique(ids)
            unknown = join_first(present[~self._is_known[present]].tolist(), 2 * _MAX_COLORS)
            advice = "add them to a class, or set `ignore_index` to leave such pixels out"
            raise DataError(f"{path}: holds the ids {unknown}, which are not in `label_map`; {advice}")
        classes: Pixels = self._classes[ids]
        return classes


def encode_runs(outline: Any, height: int, width: int) -> bytes:
    """The mask of a COCO outline, polygons or run lengths, as COCO's packed run lengths; ValueError if it is none."""
    from faster_coco_eval.core import mask

    if isinstance(outline, list) and outline:
        for polygon in outline:
            _check_polygon(polygon, height, width)
        packed: bytes = mask.merge(mask.frPyObjects(outline, height, width))["counts"]
        return packed
    if not isinstance(outline, dict):
        raise ValueError("has a segmentation that is neither polygons nor run lengths")  # noqa: TRY004
    counts = outline.get("counts")
    if outline.get("size") != [height, width]:
        raise ValueError("has run lengths of another size than its image")
    if isinstance(counts, str):
        packed = counts.encode("ascii", "replace")
    elif isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts):
        if sum(counts) != height * width:  # numbers of any length are more than the encoder takes
            raise ValueError(_NOT_COVERED)
        packed = mask.frPyObjects({"size": [height, width], "counts": counts}, height, width)["counts"]
    else:
        raise ValueError("has run lengths that are neither a text nor whole numbers")
    if _covered(packed) != height * width:  # the decoder would leave the rest as it finds it in memory
        raise ValueError(_NOT_COVERED)
    return packed


def decode_runs(packed: Sequence[bytes], height: int, width: int) -> Pixels:
    """Masks from packed run lengths: 0 and 1, uint8 [K, H, W]."""
    if not packed:
        return np.zeros((0, height, width), np.uint8)
    from faster_coco_eval.core import mask

    decoded = mask.decode([{"size": [height, width], "counts": each} for each in packed])
    return np.ascontiguousarray(decoded.transpose(2, 0, 1))


def pack_masks(masks: NDArray[np.uint8]) -> list[bytes]:
    """The packed run lengths of masks of 0 and 1, [K, H, W]."""
    from faster_coco_eval.core import mask

    if not len(masks):
        return []
    return [each["counts"] for each in mask.encode(np.asfortranarray(masks.transpose(1, 2, 0)))]


def _check_polygon(polygon: Any, height: int, width: int) -> None:
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        raise ValueError("has a polygon of fewer than three points")
    try:
        is_finite = all(type(value) in (int, float) for value in polygon) and math.isfinite(sum(polygon))
    except OverflowError:
        is_finite = False
    # Filling takes time and memory by the length of an outline, so it may not be endless.
    limits = ((polygon[::2], width), (polygon[1::2], height))
    if not is_finite or any(min(values) < -limit or max(values) > 2 * limit for values, limit in limits):
        raise ValueError("has a polygon that is not of numbers, or reaches far out of its image")


def _covered(packed: bytes) -> int:
    """How many pixels packed run lengths cover: five bits a character, differences to the last but one run."""
    values = np.frombuffer(packed, np.uint8).astype(np.int64) - 48
    if not len(values) or values.min() < 0 or values.max() > 63 or values[-1] & 32:
        return -1
    is_last = (values & 32) == 0
    starts = np.flatnonzero(np.concatenate([[True], is_last[:-1]]))
    places = np.arange(len(values)) - np.repeat(starts, np.diff(starts, append=len(values)))
    if places.max() > 6:
        return -1
    runs = np.add.reduceat((values & 31) << (5 * places), starts)
    lengths = 5 * (places[is_last] + 1)
    runs -= np.where(values[is_last] & 16, 1 << lengths, 0)  # the highest bit is the sign
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return -1 if runs.min() < 0 else int(runs.sum())


class InstanceIds(LabelMap):
    """Leaves ids as they are, up to 65,535."""

    def __init__(self) -> None:
        super().__init__({}, 0)

    def ids(self, path: Path, ids: NDArray[Any]) -> NDArray[Any]:
        """The same ids, [H, W]."""
        return ids
