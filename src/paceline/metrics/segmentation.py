"""Segmentation metrics, of pixels and of boundaries: predicted classes of pixels against batch["mask"].

Both come as a tensor, or as a list of samples of different sizes: masks [H, W], and predictions as class ids [H, W] or
logits [C, H, W]. A pixel with NaN logits, or with an id that is no class, has no prediction and is never correct.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core.arguments import NonNegative
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.text import pluralize
from paceline.data.batch import Batch
from paceline.metrics.metric import MetricValues, State

Integers = npt.NDArray[np.int64]

_NO_POINTS: Integers = np.empty((2, 0), np.int64)
_DIAGONAL_FRACTION = 0.0075
_MEANS = ("miou", "pixel_accuracy", "mean_accuracy", "frequency_weighted_iou")


@register.metric("segmentation")
class Segmentation:
    """IoU and accuracies, all from one confusion matrix of pixels.

    Pixels whose mask is `ignore_index` are left out. If that is the id of a class, the class has no value of its own; a
    pixel predicted as that class is wrong.
    - "miou": the mean over the classes that occur in a mask or a prediction.
    - "pixel_accuracy": the fraction of correct pixels; "mean_accuracy": of each class's pixels, averaged over the
      classes that occur in a mask.
    - "frequency_weighted_iou": IoU weighted by the number of pixels of each class in the masks.
    - "unseen_classes": how many classes occur in no mask and no prediction, and so are in no mean.
    - with names of `classes`, "absent.NAME", 1, of each class that no mask holds: if it is predicted its IoU is 0,
      otherwise it has none.
    - "class_iou" float64 [C], NaN for an unseen class; with names of `classes` also "iou.NAME" of each seen class.
    - "confusion" int64 [C, C]: rows are true classes, columns predicted ones.

    Without any labeled pixel only the last four are given.
    """

    def __init__(self, num_classes: int, ignore_index: int | None = 255, classes: Sequence[str] | None = None) -> None:
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.classes = classes
        self.higher_is_better = dict.fromkeys((*_MEANS, *(f"iou.{name}" for name in classes or ())), True)
        self.higher_is_better |= dict.fromkeys(("unseen_classes", *(f"absent.{name}" for name in classes or ())), False)

    def update(self, predictions: Tensor | Sequence[Tensor], batch: Batch) -> State:
        """The counts of one batch, int64 [C, C + 1]; the last column is for pixels without a prediction."""
        width = self.num_classes + 1
        counts = torch.zeros(width * width, dtype=torch.int64)
        for predicted, truth in label_maps("segmentation", self.num_classes, self.ignore_index, predictions, batch):
            counts += torch.bincount((truth * width + predicted).flatten(), minlength=width * width)
        return {"counts": counts.view(width, width)[: self.num_classes].clone()}

    def compute(self, state: State) -> MetricValues:
        confusion = state["counts"][:, : self.num_classes].contiguous()
        correct, in_truth = confusion.diagonal(), state["counts"].sum(1)
        union = in_truth + confusion.sum(0) - correct
        is_counted = torch.arange(self.num_classes) != (-1 if self.ignore_index is None else self.ignore_index)
        union[~is_counted] = 0
        ious = correct.double() / union  # NaN for an unseen class
        unseen = int(((union == 0) & is_counted).sum())
        tables: MetricValues = {"unseen_classes": unseen, "class_iou": ious, "confusion": confusion}
        absent = ((in_truth == 0) & is_counted).tolist()
        tables |= {f"absent.{name}": 1 for name, flag in zip(self.classes or [], absent, strict=False) if flag}
        total = int(in_truth.sum())
        if total == 0:
            return tables
        seen = union > 0
        values: MetricValues = {
            "miou": nan_mean(ious),
            "pixel_accuracy": int(correct.sum()) / total,
            "mean_accuracy": nan_mean(correct.double() / in_truth),
            "frequency_weighted_iou": math.fsum((in_truth[seen].double() * ious[seen]).tolist()) / total,
        }
        return values | by_class("iou", ious, self.classes) | tables


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
    distances = cv2.distanceTransform(1 - marked, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[tuple(points)]
    # Squared distances are integers, so rounding makes them exact.
    return float((np.rint(np.square(distances, dtype=np.float64)) <= distance * distance).mean())


def label_maps(
    metric: str,
    num_classes: int,
    ignore_index: int | None,
    predictions: Tensor | Sequence[Tensor],
    batch: Batch,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The predicted and the true class ids of each sample, int64 [H, W] on the CPU.

    `num_classes` stands for no class: where there is no prediction, and where the mask is ignored.
    """
    if "mask" not in batch:
        raise DataError(f"{metric} needs masks: {batch.describe_missing('mask')}")
    for sample, prediction, mask in zip(batch.ids.tolist(), predictions, batch["mask"], strict=True):
        if prediction.shape[-2:] != mask.shape:
            raise DataError(
                f"{metric}: sample {sample}: the prediction has {_size(prediction)} pixels, the mask {_size(mask)}; "
                "the task must resize predictions to the masks"
            )
        yield (
            _predicted(metric, num_classes, prediction.detach()),
            _true(metric, num_classes, ignore_index, sample, mask),
        )


def nan_mean(values: Tensor) -> float:
    """The mean without NaN, summed exactly; at least one value is not NaN."""
    defined = values[~values.isnan()].tolist()
    return math.fsum(defined) / len(defined)


def by_class(metric: str, values: Tensor, classes: Sequence[str] | None) -> MetricValues:
    """The values [C] that are not NaN as "METRIC.CLASS"."""
    pairs = zip(classes or [], values.tolist(), strict=False)
    return {f"{metric}.{name}": value for name, value in pairs if not math.isnan(value)}


def _predicted(metric: str, num_classes: int, prediction: Tensor) -> Tensor:
    if prediction.ndim == 3:
        if len(prediction) != num_classes:
            classes = pluralize(num_classes, "class")
            raise DataError(f"{metric}: the data have {classes}, the model outputs {len(prediction)}")
        best, class_ids = prediction.max(0)  # NaN is the greatest
        return class_ids.masked_fill(best.isnan(), num_classes).cpu()
    if prediction.is_floating_point():
        raise DataError(f"{metric} expects class ids [H, W] or logits [C, H, W], got {prediction.dtype} [H, W]")
    class_ids = prediction.long()
    return class_ids.masked_fill((class_ids < 0) | (class_ids >= num_classes), num_classes).cpu()


def _true(metric: str, num_classes: int, ignore_index: int | None, sample: int, mask: Tensor) -> Tensor:
    truth = mask.cpu().long()
    if ignore_index is not None:
        truth = truth.masked_fill(truth == ignore_index, num_classes)
    limit = num_classes - (ignore_index is None)
    if truth.numel() and int(truth.max()) > limit:
        ignored = "ignore_index is not set" if ignore_index is None else f"or {ignore_index} (ignore_index)"
        expected = f"expected 0 to {num_classes - 1}, {ignored}"
        raise DataError(f"{metric}: the mask of sample {sample} contains the id {int(truth.max())}; {expected}")
    return truth


def _size(planes: Tensor) -> str:
    return f"{planes.shape[-1]}×{planes.shape[-2]}"
