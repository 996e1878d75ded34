"""What every detector speaks: targets in, losses or detections out; and how detections are selected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor

from paceline.core.torchvision_ops import import_torchvision

_CANDIDATES = 1000  # of an image, before non-maximum suppression


class Target(TypedDict):
    """The objects of one image."""

    boxes: Tensor
    """[K, 4] as x1 y1 x2 y2, in pixels of the image."""
    labels: Tensor
    """int64 [K], from 0."""


class Detections(NamedTuple):
    """What is detected in one image, the most confident first."""

    boxes: Tensor
    """[K, 4] as x1 y1 x2 y2, in pixels of the image."""
    scores: Tensor
    """[K], from 0 to 1."""
    labels: Tensor
    """int64 [K], from 0."""


LossParts = dict[str, tuple[Tensor, Tensor | float]]
"""Of each loss by name: its sum over the images of a batch, and what that is to be divided by."""


@runtime_checkable
class Detector(Protocol):
    """A model that detects objects. It may also have `count(images, targets)`, what each loss is divided by, if that
    does not depend on predictions; without, a step of several micro-batches needs a first pass without gradient. With
    `divisors(counts)` too, losses are divided by what it makes of the counts of the global batch.
    """

    loss_names: Sequence[str]

    def __call__(self, images: Tensor, targets: Sequence[Target] | None = None) -> LossParts | list[Detections]:
        """The losses of images [N, C, H, W] beside their targets; without targets, the detections of each image."""
        ...


def select_detections(
    boxes: Tensor, scores: Tensor, score_thresh: float, nms_thresh: float, detections_per_img: int
) -> Detections:
    """The most confident of boxes [P, 4] with scores [P, C], without those that overlap a better one of their class."""
    flat = scores.flatten()
    above = (flat > score_thresh).nonzero().flatten()
    order = flat[above].sort(descending=True, stable=True).indices[:_CANDIDATES]
    chosen = above[order]
    places, labels = chosen // scores.shape[1], chosen % scores.shape[1]
    kept = batched_nms(boxes[places], flat[chosen], labels, nms_thresh)[:detections_per_img]
    return Detections(boxes[places[kept]], flat[chosen[kept]], labels[kept])


def batched_nms(boxes: Tensor, scores: Tensor, labels: Tensor, iou_threshold: float) -> Tensor:
    """The indices of the boxes that are kept, the most confident first; classes do not suppress each other."""
    if not len(boxes):
        return torch.empty(0, dtype=torch.int64, device=boxes.device)
    kept: Tensor = import_torchvision().ops.batched_nms(boxes.float(), scores.float(), labels, iou_threshold)
    return kept
