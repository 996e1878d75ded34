"""The outlines of many objects in a few arrays, and masks from them as COCO's own code fills them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DECIMALS = 2  # what COCO's files have


class Segments:
    """Outlines by number, polygons or run lengths in COCO's packed form, from the arrays of a `SegmentsBuilder`."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._coordinates = arrays["coordinates"]
        self._polygon_ends = arrays["polygon_ends"]
        self._polygons_ends = arrays["polygons_ends"]
        self._runs = arrays["runs"]
        self._runs_ends = arrays["runs_ends"]

    def masks(self, numbers: NDArray[Any], height: int, width: int) -> NDArray[np.uint8]:
        """The masks of these outlines in an image of this size: 0 and 1, [K, H, W]."""
        if not len(numbers):
            return np.zeros((0, height, width), np.uint8)
        from pycocotools import mask

        packed = [self._packed(int(number), height, width) for number in numbers]
        return np.ascontiguousarray(mask.decode(packed).transpose(2, 0, 1))

    def _packed(self, number: int, height: int, width: int) -> dict[str, Any]:
        from pycocotools import mask

        runs = self._runs[_span(self._runs_ends, number)]
        if len(runs):
            return {"size": [height, width], "counts": runs.tobytes()}
        polygons = _span(self._polygons_ends, number)
        parts = [self._polygon(part) for part in range(polygons.start, polygons.stop)]
        merged: dict[str, Any] = mask.merge(mask.frPyObjects(parts, height, width))
        return merged

    def _polygon(self, number: int) -> list[float]:
        values = self._coordinates[_span(self._polygon_ends, number)]
        exact: list[float] = (_restored(values) if values.dtype == np.float32 else values).tolist()
        return exact


class SegmentsBuilder:
    """Takes outlines one by one, as COCO's files have them. What is wrong with one is a ValueError."""

    def __init__(self) -> None:
        self._coordinates = array("d")
        self._polygon_ends = array("q")
        self._polygons_ends = array("q")
        self._runs = bytearray()
        self._runs_ends = array("q")

    def add(self, outline: Any, height: int, width: int) -> None:
        """The outline of the next object, in an image of this size."""
        if isinstance(outline, list) and outline:
            for polygon in outline:
                self._add_polygon(polygon, height, width)
        elif isinstance(outline, dict):
            self._runs += _packed_runs(outline, height, width)
        else:
            raise ValueError(f"segmentation is {_short(outline)}, expected polygons or run lengths")
        self._polygons_ends.append(len(self._polygon_ends))
        self._runs_ends.append(len(self._runs))

    def _add_polygon(self, polygon: Any, height: int, width: int) -> None:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            raise ValueError(f"a polygon is {_short(polygon)}, expected x, y of three points or more")
        try:
            self._coordinates.extend(polygon)
            is_finite = math.isfinite(sum(polygon))
        except (TypeError, OverflowError):
            is_finite = False
        if not is_finite:
            raise ValueError(f"a polygon is {_short(polygon)}, expected numbers")
        # Filling takes time and memory by the length of an outline, so it may not be endless.
        for values, limit in ((polygon[::2], width), (polygon[1::2], height)):
            if min(values) < -limit or max(values) > 2 * limit:
                raise ValueError(
                    f"a polygon reaches {min(values):g} to {max(values):g} in an image of {width}×{height}"
                )
        self._polygon_ends.append(len(self._coordinates))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All outlines, in the order in which they came."""
        coordinates = np.array(self._coordinates, np.float64)
        halved = coordinates.astype(np.float32)
        # A coordinate a millionth off can fall into another pixel, so they are halved only if nothing is lost.
        is_same = np.array_equal(_restored(halved), coordinates)
        return {
            "coordinates": halved if is_same else coordinates,
            "polygon_ends": np.array(self._polygon_ends, np.int64),
            "polygons_ends": np.array(self._polygons_ends, np.int64),
            "runs": np.frombuffer(bytes(self._runs), np.uint8),
            "runs_ends": np.array(self._runs_ends, np.int64),
        }


def _packed_runs(outline: dict[str, Any], height: int, width: int) -> bytes:
    """Run lengths in COCO's packed form, which are found to fill the image exactly."""
    if outline.get("size") != [height, width]:
        raise ValueError(f"run lengths are for {_short(outline.get('size'))}, the image is {[height, width]}")
    counts = outline.get("counts")
    if isinstance(counts, str):
        packed = counts.encode("ascii", "replace")
        total = _total(packed)
    elif isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts):
        packed, total = b"", sum(counts)
    else:
        raise ValueError(f"run lengths are {_short(counts)}, expected a text or whole numbers")
    if total != height * width:  # the decoder would leave the rest as it finds it in memory
        raise ValueError(f"run lengths cover {total} pixels, the image has {height * width}")
    if not packed:
        from pycocotools import mask

        packed = mask.frPyObjects({"size": [height, width], "counts": counts}, height, width)["counts"]
    return packed


def _total(packed: bytes) -> int:
    """How many pixels packed run lengths cover: five bits a character, differences to the last but one run."""
    values = np.frombuffer(packed, np.uint8).astype(np.int64) - 48
    if not len(values) or values.min() < 0 or values.max() > 63 or values[-1] & 32:
        raise ValueError("run lengths are damaged")
    is_last = (values & 32) == 0
    starts = np.flatnonzero(np.concatenate([[True], is_last[:-1]]))
    places = np.arange(len(values)) - np.repeat(starts, np.diff(starts, append=len(values)))
    if places.max() > 6:
        raise ValueError("run lengths are damaged")
    runs = np.add.reduceat((values & 31) << (5 * places), starts)
    lengths = 5 * (places[is_last] + 1)
    runs -= np.where(values[is_last] & 16, 1 << lengths, 0)  # the highest bit is the sign
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    if runs.min() < 0:
        raise ValueError("run lengths are damaged")
    return int(runs.sum())


def _restored(halved: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(np.round(halved.astype(np.float64), _DECIMALS), np.float64)


def _span(ends: NDArray[np.int64], number: int) -> slice:
    return slice(int(ends[number - 1]) if number else 0, int(ends[number]))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
