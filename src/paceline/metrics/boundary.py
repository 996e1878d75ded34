"""Boundary F1 of segmentations: predictions against batch["mask"], both as in segmentation.py."""

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
from paceline.metrics.metric import MetricValues, State
from paceline.metrics.segmentation import by_class, label_maps, nan_mean

_DIAGONAL_FRACTION = 0.0075
_MAX_DISK = 12.0  # pixels; below this, dilation by a disk is faster than a distance transform (ten times at 4 pixels)

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_NO_POINTS: Integers = np.empty((2, 0), np.int64)


@register.metric("boundary_f")
class BoundaryF:
    """F1 of boundary pixels that match one of the other side within `distance` pixels, as "boundary_f".

    A boundary pixel of a class has a neighbor above, below, left or right of another class; the edge of the image is no
    neighbor. Ignored pixels belong to no class in the mask nor in the prediction.

    For each image and class in its mask, precision is the fraction of the prediction's boundary pixels with one of the
    mask's at most `distance` away, center to center; recall is the reverse, and F their harmonic mean. It is 1 if
    neither has a boundary because the class fills both, and 0 if only one has, or if the class is not predicted.
    By default `distance` is 0.75 % of the image's diagonal.

    Each class has the mean over its images: "class_boundary_f" float64 [C], NaN if no mask holds it; with names of
    `classes` also "boundary_f.NAME". "boundary_f" is the mean over the classes in the masks, omitted if there is none.
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
        """F of each image and class, float64 [N, C], NaN where the mask does not hold the class."""
        rows = torch.full((batch.size, self.num_classes), math.nan, dtype=torch.float64)
        maps = label_maps("boundary_f", self.num_classes, self.ignore_index, predictions, batch)
        for row, (predicted, truth) in zip(rows, maps, strict=True):
            visible = predicted.masked_fill(truth == self.num_classes, self.num_classes)
            for class_id, score in self._scores(visible.numpy(), truth.numpy()).items():
                row[class_id] = score
        return {"scores": rows}

    def compute(self, state: State) -> MetricValues:
        columns = state["scores"].T
        means = torch.tensor(
            [math.nan if column.isnan().all() else nan_mean(column) for column in columns], dtype=torch.float64
        )
        values: MetricValues = {"class_boundary_f": means}
        if not means.isnan().all():
            values["boundary_f"] = nan_mean(means)
        return values | by_class("boundary_f", means, self.classes)

    def _scores(self, predicted: Integers, truth: Integers) -> dict[int, float]:
        distance = self.distance if self.distance is not None else _DIAGONAL_FRACTION * math.hypot(*truth.shape)
        num_predicted, num_true = (np.bincount(each.ravel(), minlength=self.num_classes) for each in (predicted, truth))
        of_prediction, of_truth = _boundaries(predicted), _boundaries(truth)
        scores = {}
        for class_id in num_true[: self.num_classes].nonzero()[0].tolist():
            points = of_prediction.get(class_id, _NO_POINTS), of_truth.get(class_id, _NO_POINTS)
            scores[class_id] = _f1(*points, distance) if num_predicted[class_id] else 0.0
        return scores


def _boundaries(class_ids: Integers) -> dict[int, Integers]:
    """Rows and columns [2, K] of the boundary pixels of each class that has any."""
    is_boundary = np.zeros(class_ids.shape, np.bool_)
    across, down = class_ids[:, 1:] != class_ids[:, :-1], class_ids[1:] != class_ids[:-1]
    is_boundary[:, 1:] |= across
    is_boundary[:, :-1] |= across
    is_boundary[1:] |= down
    is_boundary[:-1] |= down
    points = np.stack(is_boundary.nonzero())
    owners = class_ids[is_boundary]
    order = np.argsort(owners, kind="stable")
    classes, starts = np.unique(owners[order], return_index=True)
    parts = np.split(points[:, order], starts[1:], axis=1)
    return dict(zip(classes.tolist(), parts, strict=False))  # without any boundary there is one empty part


def _f1(predicted: Integers, truth: Integers, distance: float) -> float:
    if not predicted.size or not truth.size:
        return float(predicted.size == truth.size)
    # Only distances between the two boundaries matter, so their common bounding box is enough.
    corner = np.minimum(predicted.min(1), truth.min(1))[:, None]
    shape = (np.maximum(predicted.max(1), truth.max(1))[:, None] - corner + 1).ravel().tolist()
    predicted, truth = predicted - corner, truth - corner
    precision, recall = _matched(predicted, truth, shape, distance), _matched(truth, predicted, shape, distance)
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


def _matched(points: Integers, others: Integers, shape: list[int], distance: float) -> float:
    """The fraction of points with one of the others within the distance."""
    marked = np.zeros(shape, np.uint8)
    marked[tuple(others)] = 1
    is_near = dilate(marked, distance) if distance < _MAX_DISK else threshold_distance(marked, distance)
    return float(is_near[tuple(points)].mean())


def dilate(marked: npt.NDArray[np.uint8], distance: float) -> Flags:
    """Which pixels are within the distance of a marked one, by dilation with a disk."""
    squares = np.square(np.arange(-int(distance), int(distance) + 1))
    disk = (squares[:, None] + squares <= distance * distance).astype(np.uint8)
    return np.asarray(cv2.dilate(marked, disk) > 0)


def threshold_distance(marked: npt.NDArray[np.uint8], distance: float) -> Flags:
    """The same by a distance transform; squared distances are integers, so rounding makes them exact."""
    distances = cv2.distanceTransform(1 - marked, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    return np.asarray(np.rint(np.square(distances, dtype=np.float64)) <= distance * distance)
