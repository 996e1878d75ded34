"""Four samples as one, with all their objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.core.arguments import Share
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import Fill, PixelValue
from paceline.data.batch import RAGGED, Sample
from paceline.data.transforms.coordinates import Window, place_objects, size_of
from paceline.data.transforms.functional import frame, resize
from paceline.data.transforms.geometric import height_and_width

Draws = NDArray[np.float64]
Side = Annotated[int, Field(ge=2)]


@register.transform("mosaic")
@dataclass(frozen=True)
class Mosaic:
    """Lay four images around a point of a canvas of `size`, each fitted into half of its height and width.

    The point is drawn from the canvas's middle half; one corner of each image touches it, what reaches beyond the
    canvas is cut off, and what nothing covers is filled. Objects of which less than `min_visible` is left are left
    out. With twice the final size, cut down by what follows, objects keep about their scale. It happens with
    probability `p`; else the sample stays as it is, so a transform that gives one size has to follow.
    """

    size: Side | Annotated[Sequence[Side], Field(min_length=2, max_length=2)]
    p: Share = 1.0
    fill: Fill = 114
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1
    others: ClassVar[int] = 3
    draws: ClassVar[int] = 3
    is_batch: ClassVar[bool] = False
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: Draws, others: Sequence[Sample]) -> Sample:
        """The four as one: the sample above and left of the point, the `others` right of it, below, and both."""
        if draws[0] >= self.p:
            return dict(sample)
        if "label" in sample:
            raise DataError("mosaic joins images with their objects, but a label is of one image alone: leave it out")
        canvas = height_and_width(self.size)
        row, column = (_inner(side, float(draw)) for side, draw in zip(canvas, draws[1:], strict=True))
        tiles = [
            self._tile(each, canvas, row, column, is_below=number > 1, is_right=number % 2 == 1)
            for number, each in enumerate([sample, *others])
        ]
        joined = {name: value for name, value in sample.items() if name != "matrix"}
        joined["image"] = _around(tiles, "image", -3, -2)
        if "mask" in sample:
            joined["mask"] = _around(tiles, "mask", -2, -1)
        return joined | {name: np.concatenate([tile[name] for tile in tiles]) for name in RAGGED.intersection(sample)}

    def _tile(
        self, sample: Sample, canvas: tuple[int, int], row: int, column: int, is_below: bool, is_right: bool
    ) -> Sample:
        """One of the four as its part of the canvas shows it, with objects where they are on the whole canvas."""
        height, width = size_of(sample)
        factor = min(canvas[0] / height, canvas[1] / width) / 2
        rows, columns = max(1, round(height * factor)), max(1, round(width * factor))
        fitted = resize(sample, Window(0, 0, height, width), rows, columns)
        top, part_height = (0, canvas[0] - row) if is_below else (rows - row, row)
        left, part_width = (0, canvas[1] - column) if is_right else (columns - column, column)
        shown = Window(top, left, part_height, part_width)
        tile = frame(fitted, shown, self.fill, self.mask_fill, self.min_visible)
        start = row if is_below else 0, column if is_right else 0
        return place_objects(
            tile, np.array([[1.0, 0, start[1]], [0, 1, start[0]]]), *canvas, _spread(tile, start, canvas)
        )


def _inner(side: int, draw: float) -> int:
    """A place in the middle half of a side, with a pixel at least before and after it."""
    return min(max(1, int(side * (0.25 + 0.5 * draw))), side - 1)


def _around(tiles: Sequence[Sample], name: str, down: int, across: int) -> NDArray[np.uint8]:
    above, below = (np.concatenate([tile[name] for tile in pair], across) for pair in (tiles[:2], tiles[2:]))
    return np.concatenate([above, below], down)


def _spread(tile: Sample, start: tuple[int, int], canvas: tuple[int, int]) -> NDArray[np.uint8] | None:
    """The masks of a part, on the whole canvas."""
    if "masks" not in tile:
        return None
    masks: NDArray[np.uint8] = tile["masks"]
    whole = np.zeros((len(masks), *canvas), np.uint8)
    whole[:, start[0] : start[0] + masks.shape[1], start[1] : start[1] + masks.shape[2]] = masks
    return whole
