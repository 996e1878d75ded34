"""How well the outlines of regions are met: predictions against batch["mask"], both as in segmentation.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core.arguments import NonNegative
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.metrics.metric import Figures, State
from paceline.metrics.segmentation import class_maps, mean, named

_SHARE_OF_DIAGONAL = 0.0075
_FAR = 12.0  # pixels; nearer than this a disk is faster than distances, ten times so at four pixels

Numbers = npt.NDArray[np.int64]
"""A class of each pixel, [H, W]."""
Places = npt.NDArray[np.int64]
"""Rows and columns of pixels, [2, K]."""
Flags = npt.NDArray[np.bool_]

_NOWHERE: Places = np.empty((2, 0), np.int64)


@register.metric("boundary_f")
class BoundaryF:
    """F1 of boundary pixels that have one of the other side within `distance` pixels, as "boundary_f".

    A boundary pixel of a class belongs to it and has a neighbor above, below, left or right that does not; the edge
    of the image is no neighbor. Ignored pixels belong to no class in the mask nor in the prediction.

    For each image and class that its mask holds, precision is the share of the prediction's boundary pixels with one
    of the mask's at most `distance` away, center to center; recall is the same the other way round, and F their
    harmonic mean. It is 1 if neither has a boundary, since both are of that class all over, and 0 if only one has or
    the class is not predicted at all. By default `distance` is 0.75 % of the image's diagonal.

    Each class has the mean over its images: "class_boundary_f" float64 [C], not a number if no mask holds it; with
    names of `classes` also "boundary_f.NAME" of each that one holds. "boundary_f" is the mean over those classes, and
    left out if there is none.
    """

    def __init__(
        self,
        num_classes: int,
        ignore_index: int | None = 255,
        distance: NonNegative | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.distance = distance
        self.classes = classes
        values = ("boundary_f", *(f"boundary_f.{name}" for name in classes or ()))
        self.higher_is_better = dict.fromkeys(values, True)

    def update(self, predictions: Tensor | Sequence[Tensor], batch: Batch) -> State:
        """F of each image and class, float64 [N, C], not a number where the mask does not hold the class."""
        rows = torch.full((batch.size, self.num_classes), math.nan, dtype=torch.float64)
        maps = class_maps("boundary_f", self.num_classes, self.ignore_index, predictions, batch)
        for row, (predicted, truth) in zip(rows, maps, strict=True):
            seen = predicted.masked_fill(truth == self.num_classes, self.num_classes)
            for number, score in self._scores(seen.numpy(), truth.numpy()).items():
                row[number] = score
        return {"scores": rows}

    def compute(self, state: State) -> Figures:
        """The mean, and the means of classes."""
        columns = state["scores"].T
        means = torch.tensor(
            [math.nan if column.isnan().all() else mean(column) for column in columns], dtype=torch.float64
        )
        metrics: Figures = {"class_boundary_f": means}
        if not means.isnan().all():
            metrics["boundary_f"] = mean(means)
        return metrics | named("boundary_f", means, self.classes)

    def _scores(self, predicted: Numbers, truth: Numbers) -> dict[int, float]:
        reach = self.distance if self.distance is not None else _SHARE_OF_DIAGONAL * math.hypot(*truth.shape)
        held, met = (np.bincount(each.ravel(), minlength=self.num_classes + 1) for each in (truth, predicted))
        of_prediction, of_truth = _boundaries(predicted), _boundaries(truth)
        found = {}
        for number in held[: self.num_classes].nonzero()[0].tolist():
            pair = of_prediction.get(number, _NOWHERE), of_truth.get(number, _NOWHERE)
            found[number] = _score(*pair, reach) if met[number] else 0.0
        return found


def _boundaries(numbers: Numbers) -> dict[int, Places]:
    """Where the boundary pixels of each class are, for classes that have any: row and column, int64 [2, K]."""
    found = np.zeros(numbers.shape, np.bool_)
    across, down = numbers[:, 1:] != numbers[:, :-1], numbers[1:] != numbers[:-1]
    found[:, 1:] |= across
    found[:, :-1] |= across
    found[1:] |= down
    found[:-1] |= down
    places = np.stack(found.nonzero())
    owners = numbers[found]
    order = np.argsort(owners, kind="stable")
    classes, starts = np.unique(owners[order], return_index=True)
    parts = np.split(places[:, order], starts[1:], axis=1)
    return dict(zip(classes.tolist(), parts, strict=False))  # without any boundary there is one part, of nothing


def _score(predicted: Places, truth: Places, reach: float) -> float:
    if not predicted.size or not truth.size:
        return float(predicted.size == truth.size)
    # Distances are only wanted from one boundary to the other, so the rectangle that holds both is enough.
    corner = np.minimum(predicted.min(1), truth.min(1))[:, None]
    sides = np.maximum(predicted.max(1), truth.max(1))[:, None] - corner + 1
    predicted, truth = predicted - corner, truth - corner
    precision, recall = _share_near(predicted, truth, sides, reach), _share_near(truth, predicted, sides, reach)
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


def _share_near(places: Places, others: Places, sides: Places, reach: float) -> float:
    """The share of the places that have one of the others within reach, in a rectangle of these sides."""
    marked = np.zeros(sides.ravel().tolist(), np.uint8)
    marked[tuple(others)] = 1
    near = _spread(marked, reach) if reach < _FAR else _measured(marked, reach)
    num_places: int = places.shape[1]
    return int(near[tuple(places)].sum()) / num_places


def _spread(marked: npt.NDArray[np.uint8], reach: float) -> Flags:
    """Which pixels are within reach of a marked one, by moving a disk over the marked ones."""
    steps = np.square(np.arange(-int(reach), int(reach) + 1))
    disk = (steps[:, None] + steps <= reach * reach).astype(np.uint8)
    near: Flags = cv2.dilate(marked, disk) > 0
    return near


def _measured(marked: npt.NDArray[np.uint8], reach: float) -> Flags:
    """The same by the distance of every pixel, whose square is a whole number, so that rounding makes it exact."""
    distances = cv2.distanceTransform(1 - marked, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    near: Flags = np.rint(np.square(distances, dtype=np.float64)) <= reach * reach
    return near
