"""Metrics for a class of each pixel: predictions against batch["mask"].

Both are given sample by sample, as a tensor or as a list of samples of different sizes: masks [H, W], and predictions
as class numbers [H, W] or as logits [C, H, W]. A pixel whose logits are not numbers, or whose number is that of no
class, has no prediction, and never counts as right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.text import pluralize
from paceline.data.batch import Batch
from paceline.metrics.metric import Figures, State

_SHARES = ("miou", "pixel_accuracy", "mean_accuracy", "frequency_weighted_iou")


@register.metric("segmentation")
class Segmentation:
    """Intersection over union and accuracies, all from one confusion matrix of pixels.

    Pixels whose mask is `ignore_index` are left out, and if that is the number of a class, so is the class: a pixel
    that is taken for it is wrong, but it has no metric of its own.
    - "miou": the mean over the classes that occur, in a mask or in a prediction.
    - "pixel_accuracy": the share of pixels that are right; "mean_accuracy": of each class's pixels, the mean over the
      classes that occur in a mask.
    - "frequency_weighted_iou": each class weighs as many pixels as it has in the masks.
    - "unseen_classes": how many classes occur in no mask and no prediction, and so are in no mean.
    - with names of `classes`, "absent.NAME", 1, of each class that no mask holds: predicted, its IoU is 0, and not
      predicted it has none.
    - "class_iou" float64 [C], not a number for an unseen class; with names of `classes` also "iou.NAME" of each seen.
    - "confusion" int64 [C, C], rows the truth and columns the prediction.

    Without any labeled pixel only the last four are given.
    """

    def __init__(self, num_classes: int, ignore_index: int | None = 255, classes: Sequence[str] | None = None) -> None:
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.classes = classes
        self.higher_is_better = dict.fromkeys((*_SHARES, *(f"iou.{name}" for name in classes or ())), True)
        self.higher_is_better |= dict.fromkeys(("unseen_classes", *(f"absent.{name}" for name in classes or ())), False)

    def update(self, predictions: Tensor | Sequence[Tensor], batch: Batch) -> State:
        """The counts of one batch, int64 [C, C + 1]: the last column is for pixels without a prediction."""
        width = self.num_classes + 1
        counts = torch.zeros(width * width, dtype=torch.int64)
        for predicted, truth in class_maps("segmentation", self.num_classes, self.ignore_index, predictions, batch):
            counts += torch.bincount((truth * width + predicted).flatten(), minlength=width * width)
        return {"counts": counts.view(width, width)[: self.num_classes].clone()}

    def compute(self, state: State) -> Figures:
        """Shares from 0 to 1, and the tables."""
        confusion = state["counts"][:, : self.num_classes].contiguous()
        right, in_truth = confusion.diagonal(), state["counts"].sum(1)
        union = in_truth + confusion.sum(0) - right
        counts = torch.tensor([number != self.ignore_index for number in range(self.num_classes)])
        union[~counts] = 0
        shares = right.double() / union  # not a number for an unseen class
        total = int(in_truth.sum())
        pixels = zip(self.classes or [], in_truth.tolist(), counts.tolist(), strict=False)
        unseen = int(((union == 0) & counts).sum())
        beside: Figures = {"unseen_classes": unseen, "class_iou": shares, "confusion": confusion}
        beside |= {f"absent.{name}": 1 for name, number, is_counted in pixels if number == 0 and is_counted}
        if total == 0:
            return beside
        seen = union > 0
        metrics: Figures = {
            "miou": mean(shares),
            "pixel_accuracy": int(right.sum()) / total,
            "mean_accuracy": mean(right.double() / in_truth),
            "frequency_weighted_iou": math.fsum((in_truth[seen].double() * shares[seen]).tolist()) / total,
        }
        return metrics | named("iou", shares, self.classes) | beside


def class_maps(
    metric: str,
    num_classes: int,
    ignore_index: int | None,
    predictions: Tensor | Sequence[Tensor],
    batch: Batch,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each sample what was predicted and what is true, int64 [H, W] on the host.

    The number of classes stands for no class: where there is no prediction, and where the truth is ignored.
    """
    if "mask" not in batch:
        raise DataError(f"{metric} compares predictions with masks, and these samples have none; use data with masks")
    for sample, prediction, mask in zip(batch.ids.tolist(), predictions, batch["mask"], strict=True):
        if prediction.shape[-2:] != mask.shape:
            raise DataError(
                f"{metric}: the prediction of sample {sample} is {_size(prediction)} pixels, its mask {_size(mask)}; "
                "the task has to resize predictions to the masks first"
            )
        yield (
            _predicted(metric, num_classes, prediction.detach()),
            _true(metric, num_classes, ignore_index, sample, mask),
        )


def mean(shares: Tensor) -> float:
    """The mean over those that are numbers; there has to be one."""
    defined = shares[~shares.isnan()].tolist()
    return math.fsum(defined) / len(defined)


def named(metric: str, shares: Tensor, classes: Sequence[str] | None) -> Figures:
    """Those that are numbers, as metrics by the names of their classes."""
    pairs = zip(classes or [], shares.tolist(), strict=False)
    return {f"{metric}.{name}": share for name, share in pairs if not math.isnan(share)}


def _predicted(metric: str, num_classes: int, prediction: Tensor) -> Tensor:
    if prediction.ndim == 3:
        if len(prediction) != num_classes:
            classes = pluralize(num_classes, "class")
            raise DataError(f"{metric}: the data have {classes}, but the model tells {len(prediction)} apart")
        best, numbers = prediction.max(0)  # what is not a number is the greatest
        return numbers.masked_fill(best.isnan(), num_classes).cpu()
    if prediction.is_floating_point():
        raise DataError(
            f"{metric} takes a class number for each pixel, or logits of all classes, got one {prediction.dtype} each"
        )
    numbers = prediction.long()
    return numbers.masked_fill((numbers < 0) | (numbers >= num_classes), num_classes).cpu()


def _true(metric: str, num_classes: int, ignore_index: int | None, sample: int, mask: Tensor) -> Tensor:
    truth = mask.cpu().long()
    if ignore_index is not None:
        truth = truth.masked_fill(truth == ignore_index, num_classes)
    limit = num_classes - (ignore_index is None)
    if truth.numel() and int(truth.max()) > limit:
        expected = f"expected 0 to {num_classes - 1}"
        expected += ", as ignore_index is not set" if ignore_index is None else f", or {ignore_index}, ignore_index"
        raise DataError(f"{metric}: the mask of sample {sample} holds the id {int(truth.max())}; {expected}")
    return truth


def _size(planes: Tensor) -> str:
    return f"{planes.shape[-1]}×{planes.shape[-2]}"
