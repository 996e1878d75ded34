"""Hungarian matching of predicted boxes and objects, for transformer detectors.

The assignment is computed on the host by SciPy. All costs of a micro-batch, of every decoder layer and image, leave the
device in one copy; nothing else of a training step is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.torch_private import is_fake

Places = NDArray[np.int64]
"""Pairs of a prediction and an object, [4, M]: layer, image, query, and the object's number in its image."""


class Objects(NamedTuple):
    """The objects of a micro-batch, padded to the most of an image, T."""

    numbers: list[int]
    """How many each image has."""
    labels: Tensor
    """int64 [N, T]"""
    boxes: Tensor
    """[N, T, 4] as center x, center y, width, height, in shares of the image."""


class MatchingCost(NamedTuple):
    """What the costs of a pair are multiplied by."""

    label: float
    box: float
    giou: float
    alpha: float = 0.25
    gamma: float = 2.0
    is_focal: bool = True

    def __call__(self, logits: Tensor, boxes: Tensor, objects: Objects) -> Tensor:
        """The costs [S, N, Q, T] of predictions [S, N, Q, …] of S layers."""
        shape = (*logits.shape[:-1], objects.labels.shape[1])
        labels = objects.labels[None, :, None].expand(shape)
        if self.is_focal:
            probability = logits.sigmoid().gather(-1, labels)
            absent = (1 - self.alpha) * probability**self.gamma * -(1 - probability + 1e-8).log()
            present = self.alpha * (1 - probability) ** self.gamma * -(probability + 1e-8).log()
            of_labels = present - absent
        else:
            of_labels = -logits.softmax(-1).gather(-1, labels)
        predicted, wanted = boxes[:, :, :, None], objects.boxes[None, :, None]
        of_boxes = (predicted - wanted).abs().sum(-1)
        overlaps, _ = generalized_iou(to_corners(predicted), to_corners(wanted))
        cost = self.box * of_boxes + self.label * of_labels - self.giou * overlaps
        most = torch.finfo(cost.dtype).max  # whatever is not finite is matched last
        return cost.nan_to_num(most, most, most)


def start_copy(costs: Tensor) -> Callable[[], NDArray[np.floating]]:
    """Begin to copy costs to the host; the function that is returned waits for them.

    It is the one time in a micro-batch that the host waits for the device. Where tensors are fake, costs are 0.
    """
    if is_fake(costs) and not costs.is_cuda:
        shape = tuple(costs.shape)
        return lambda: np.zeros(shape)
    on_host = costs.to("cpu", non_blocking=True)
    if not costs.is_cuda:
        return on_host.numpy
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> NDArray[np.floating]:
        copied.synchronize()
        return on_host.numpy()

    return wait


def match(costs: NDArray[np.floating], numbers: Sequence[int], groups: int = 1) -> Places:
    """The pairs of least cost, for each layer, image and group of queries."""
    from scipy.optimize import linear_sum_assignment

    num_layers, _, num_queries, _ = costs.shape
    size = num_queries // groups
    found = [np.empty((4, 0), np.int64)]
    for layer in range(num_layers):
        for image, number in enumerate(numbers):
            for start in range(0, groups * size, size) if number else ():
                queries, columns = linear_sum_assignment(costs[layer, image, start : start + size, :number])
                fixed = np.full((2, len(queries)), [[layer], [image]])
                found.append(np.stack([*fixed, queries + start, columns]).astype(np.int64))
    return np.concatenate(found, 1)


def to_corners(boxes: Tensor) -> Tensor:
    """Boxes [..., 4] as x1 y1 x2 y2, of those given by center and size."""
    centers, sizes = boxes[..., :2], boxes[..., 2:]
    return torch.cat([centers - 0.5 * sizes, centers + 0.5 * sizes], -1)


def generalized_iou(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The generalized IoU of corners [..., 4], pair by pair, and the IoU."""
    areas = [(corners[..., 2:] - corners[..., :2]).prod(-1) for corners in (first, second)]
    inner = (torch.min(first[..., 2:], second[..., 2:]) - torch.max(first[..., :2], second[..., :2])).clamp(min=0)
    outer = torch.max(first[..., 2:], second[..., 2:]) - torch.min(first[..., :2], second[..., :2])
    least = torch.finfo(first.dtype).tiny  # boxes without area
    overlap, hull = inner.prod(-1), outer.clamp(min=0).prod(-1).clamp(min=least)
    union = (areas[0] + areas[1] - overlap).clamp(min=least)
    iou = overlap / union
    return iou - (hull - union) / hull, iou
