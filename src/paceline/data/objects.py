"""What all formats of objects share: boxes that are checked against their images, and compact storage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular
from paceline.data.batch import Sample
from paceline.data.index.splits import draw_parts

BadBoxes = Literal["stop", "drop", "clip"]
"""What to do about boxes that do not lie in their image.

`stop` refuses the data set, `drop` leaves all of them out; `clip` cuts those that are partly outside to the image,
and leaves out what is empty, inverted or wholly outside.
"""

_FLAWS = ("", "partly outside its image", "outside its image", "empty", "inverted")
_PARTLY_OUTSIDE = 1
_ROUNDING = 0.01  # pixels over the border that are cut off without a word: numbers are written with few digits


class Checked(NamedTuple):
    """Boxes that are sound: float32 [K, 4] as x1 y1 x2 y2, which of the given ones they are, and what was wrong."""

    boxes: NDArray[np.float32]
    kept: NDArray[np.bool_]
    notes: list[str]


def check_boxes(
    boxes: NDArray[np.float64],
    extents: NDArray[np.float64],
    sizes: NDArray[np.int64],
    policy: BadBoxes,
    place: Callable[[int], str],
) -> Checked:
    """Boxes [K, 4] that lie in their images, whose heights and widths are `sizes` [K, 2].

    `extents` [K, 2] are the widths and heights as the file has them; `place` tells where box k is written.
    """
    with np.errstate(over="ignore"):  # far outside is outside
        exact = boxes.astype(np.float32)
    clipped = np.clip(exact, 0, sizes[:, [1, 0, 1, 0]].astype(np.float32))
    flaws = np.zeros(len(boxes), np.int8)
    flaws[(abs(clipped - exact) > _ROUNDING).any(1)] = _PARTLY_OUTSIDE
    flaws[(clipped[:, 2:] <= clipped[:, :2]).any(1)] = 2
    flaws[(extents == 0).any(1) | (exact[:, 2:] == exact[:, :2]).any(1)] = 3
    flaws[(extents < 0).any(1)] = 4
    found = np.flatnonzero(flaws)
    kept = flaws <= _PARTLY_OUTSIDE if policy == "clip" else flaws == 0
    if not len(found):
        return Checked(clipped, kept, [])
    counts = _counts(flaws)
    if policy == "stop":
        lines = (f"{place(box)}: {_FLAWS[flaws[box]]}" for box in found.tolist())
        advice = "repair them, or set `bad_boxes: clip` or `bad_boxes: drop`"
        raise DataError("; ".join([counts, *at_most(lines, len(found), 10), advice]))
    lines = (f"{place(k)}: {_FLAWS[flaws[k]]}, {'clipped' if kept[k] else 'left out'}" for k in found.tolist())
    return Checked(clipped[kept], kept, [counts, *at_most(lines, len(found))])


def _counts(flaws: NDArray[np.int8]) -> str:
    each = [f"{count:,} {flaw}" for flaw, count in zip(_FLAWS, np.bincount(flaws), strict=False) if flaw and count]
    number = np.count_nonzero(flaws)
    return f"{number:,} of {len(flaws):,} boxes {'is' if number == 1 else 'are'} bad: {', '.join(each)}"


def at_most(lines: Iterable[str], total: int, most: int = 100) -> list[str]:
    """The first of `total` lines, and how many more there are."""
    first = list(islice(lines, most))
    return [*first, f"and {total - most:,} more"] if total > most else first


class Objects:
    """The objects of all images in a few arrays, which processes share; those of an image lie together."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._starts, self._boxes = arrays["starts"], arrays["boxes"]
        self._classes, self._crowd, self._area = arrays["classes"], arrays["crowd"], arrays["area"]

    @staticmethod
    def arrays(
        num_images: int,
        images: NDArray[np.int64],
        boxes: NDArray[np.float32],
        classes: NDArray[np.int64],
        crowd: NDArray[np.bool_],
        area: NDArray[np.float32] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """What it is made of, given the image of each object, in rising order, and what is known of the object.

        `crowd` are those that are no single object, or too difficult to count: predictions of them are neither right
        nor wrong. An area that is not given is that of the box.
        """
        spans = boxes[:, 2:] - boxes[:, :2]
        return {
            "starts": np.searchsorted(images, np.arange(num_images + 1)),
            "boxes": boxes,
            "classes": classes,
            "crowd": crowd.astype(np.uint8),
            "area": spans[:, 0] * spans[:, 1] if area is None else area,
        }

    def of(self, image: int) -> slice:
        """The objects of one image."""
        return slice(int(self._starts[image]), int(self._starts[image + 1]))

    def fields(self, image: int) -> Sample:
        """What a sample says of the objects of one image, each K long."""
        which = self.of(image)
        return {
            "boxes": self._boxes[which].copy(),
            "classes": self._classes[which].astype(np.int64),
            "crowd": self._crowd[which].astype(np.bool_),
            "area": self._area[which].copy(),
        }


def drawn_part(size: int, split: str | None, shares: Mapping[str, float] | None, seed: int) -> NDArray[np.int64]:
    """The numbers of the images of a split that is a share of them all, ascending; all of them without shares."""
    if not shares:
        return np.arange(size)
    if split is None or split not in shares:
        raise DataError(f"the split {split!r} is none of split_shares, which are {', '.join(shares)}")
    members = draw_parts(size, shares, seed)[split].astype(np.int64)
    if not len(members):
        raise DataError(f"the split {split} has no samples: its share is {shares[split]:g} of {size:,}; give it more")
    return members


def read_json(path: Path) -> Any:
    """What a JSON file holds; one that is missing or damaged is a DataError."""
    try:
        with open_regular(path) as file:
            return json.loads(file.read())
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON, or damaged ({error})") from error
