"""What every detector speaks: targets in, losses or detections out; and how detections are selected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NotRequired, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor

from paceline.core.torchvision_ops import import_torchvision
from paceline.data.padding import inside_sizes

_CANDIDATES = 1000  # of an image, before non-maximum suppression


class Target(TypedDict):
    """The objects of one image."""

    boxes: Tensor
    """[K, 4] as x1 y1 x2 y2, in pixels of the image."""
    labels: Tensor
    """int64 [K], from 0."""
    masks: NotRequired[Tensor]
    """uint8 0/1 [K, H, W], for models that predict masks."""
    keypoints: NotRequired[Tensor]
    """[K, J, 3] as x, y and 0 if not labeled, for models that predict keypoints."""


class Detections(NamedTuple):
    """What is detected in one image, the most confident first."""

    boxes: Tensor
    """[K, 4] as x1 y1 x2 y2, in pixels of the image."""
    scores: Tensor
    """[K], from 0 to 1."""
    labels: Tensor
    """int64 [K], from 0."""


class Instances(NamedTuple):
    """What is detected in one image with the mask of each object, the most confident first."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    masks: Tensor
    """[K, h, w], from 0 to 1: how likely each part belongs to the object, at any resolution."""
    in_boxes: bool = False
    """Whether each mask spans its box, as in Mask R-CNN; else all span the image."""


class KeypointDetections(NamedTuple):
    """What is detected in one image with the keypoints of each object, the most confident first."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    keypoints: Tensor
    """[K, J, 2] as x and y, in pixels of the image."""
    keypoint_scores: Tensor
    """[K, J], above 0 where the model is certain."""


LossParts = dict[str, tuple[Tensor, Tensor | float]]
"""Of each loss by name: its sum over the images of a batch, and what that is to be divided by."""


@runtime_checkable
class Detector(Protocol):
    """A model that detects objects. It may also have `count(images, targets)`, what each loss is divided by, if that
    does not depend on predictions; without, a step of several micro-batches needs a first pass without gradient. With
    `divisors(counts)` too, losses are divided by what it makes of the counts of the global batch. One
    whose attribute `predicts_masks` is True takes masks in its targets and gives `Instances` for `Detections`; with
    `predicts_keypoints` it takes keypoints and gives `KeypointDetections`.

    If its forward takes `image_sizes`, it gets the height and width of each image where images differ in size and are
    padded with zeros on the right and below; without, it sees the zeros.
    """

    loss_names: Sequence[str]

    def __call__(
        self, images: Tensor, targets: Sequence[Target] | None = None
    ) -> LossParts | list[Detections] | list[Instances]:
        """The losses of images [N, C, H, W] beside their targets; without targets, the detections of each image."""
        ...


ImageSizes = Sequence[tuple[int, int]]
"""Height and width of each image of a batch, without its padding."""
ABSENT = -100.0
"""The logit of every class in the padding: its probability and its focal loss are 0."""


def cells_inside(sizes: ImageSizes, shape: Sequence[int], steps: Sequence[int], device: torch.device) -> Tensor:
    """Which cells of a feature map of `shape` begin inside their image, bool [N, H, W]; they are `steps` apart."""
    counts = [[-(-side // step) for side, step in zip(size, steps, strict=True)] for size in sizes]
    return inside_sizes(torch.tensor(counts), shape, device)


def select_detections(
    boxes: Tensor, scores: Tensor, score_thresh: float, nms_thresh: float, detections_per_img: int
) -> Detections:
    """The most confident of boxes [P, 4] with scores [P, C], without those that overlap a better one of their class."""
    places, labels = select_candidates(boxes, scores, score_thresh, nms_thresh, detections_per_img)
    return Detections(boxes[places], scores[places, labels], labels)


def select_candidates(
    boxes: Tensor, scores: Tensor, score_thresh: float, nms_thresh: float, detections_per_img: int
) -> tuple[Tensor, Tensor]:
    """Which of the boxes these are, int64 [K], and the class of each."""
    flat = scores.flatten()
    above = (flat > score_thresh).nonzero().flatten()
    order = flat[above].sort(descending=True, stable=True).indices[:_CANDIDATES]
    chosen = above[order]
    places, labels = chosen // scores.shape[1], chosen % scores.shape[1]
    kept = batched_nms(boxes[places], flat[chosen], labels, nms_thresh)[:detections_per_img]
    return places[kept], labels[kept]


def batched_nms(boxes: Tensor, scores: Tensor, labels: Tensor, iou_threshold: float) -> Tensor:
    """The indices of the boxes that are kept, the most confident first; classes do not suppress each other."""
    if not len(boxes):
        return torch.empty(0, dtype=torch.int64, device=boxes.device)
    kept: Tensor = import_torchvision().ops.batched_nms(boxes.float(), scores.float(), labels, iou_threshold)
    return kept
