"""The losses of torchvision's SSD without a value that the host reads, so that a GPU never waits for Python.

torchvision selects matched anchors and hard negatives, and only the device knows how many there are. Here every anchor
is computed, and those that are not selected count 0. The sums are the same, but for images so crowded that they have
too few negatives: torchvision then counts positives twice. Boxes without area match nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.torchvision_ops import import_torchvision
from paceline.core.world import constant


def ssd_forward(detector: Any, counts: dict[str, Tensor | float], images: Any, targets: Any = None) -> Any:
    """What `SSD.forward` gives: with targets, its two losses, whose divisor goes to counts["positives"]."""
    if targets is None:
        return type(detector).forward(detector, images)
    batch, _ = detector.transform(images, None)
    features = detector.backbone(batch.tensors)
    maps = [features] if isinstance(features, Tensor) else list(features.values())
    outputs = detector.head(maps)
    anchors = _anchors(detector, batch, maps).expand(len(images), -1, -1)  # [N, A, 4]
    boxes, labels = _match(targets, anchors, detector.proposal_matcher.high_threshold)
    positive = labels > 0
    count = counts["positives"] = positive.sum()
    wanted = _encode(boxes, anchors) * constant(detector.box_coder.weights, boxes.device, boxes.dtype)
    distances = F.smooth_l1_loss(outputs["bbox_regression"], wanted, reduction="none").sum(-1)
    errors = F.cross_entropy(outputs["cls_logits"].transpose(1, 2), labels, reduction="none")
    selected = positive | _hard_negatives(errors.detach(), positive, detector.neg_to_pos_ratio)
    divisor = count.clamp(min=1)
    return {
        "bbox_regression": distances.where(positive, 0).sum() / divisor,
        "classification": errors.where(selected, 0).sum() / divisor,
    }


def _anchors(detector: Any, batch: Any, maps: Sequence[Tensor]) -> Tensor:
    """The anchors of an image [A, 4], which torchvision makes on the host and copies when the device is idle."""
    batch_on_host, *on_host = (torch.empty(0, *each.shape[-2:], dtype=maps[0].dtype) for each in (batch.tensors, *maps))
    [anchors] = detector.anchor_generator(type(batch)(batch_on_host, batch.image_sizes[:1]), on_host)
    moved: Tensor = anchors.to(maps[0].device, non_blocking=True)
    return moved


def _match(targets: Sequence[dict[str, Tensor]], anchors: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The box [N, A, 4] and the label [N, A] of each anchor; the background has label 0 and the anchor itself.

    An anchor takes the box that overlaps it most, if by at least `threshold`; and each box has its best anchor.
    """
    all_boxes, all_labels = [], []
    for target, own in zip(targets, anchors, strict=True):
        boxes, labels = target["boxes"].to(own), target["labels"]
        if not len(boxes):
            boxes, labels = own[:1], labels.new_zeros(1)
        labels = labels.where((boxes[:, 2:] > boxes[:, :2]).all(1), 0)
        overlaps = import_torchvision().ops.box_iou(boxes, own)  # [K, A]
        overlap, index = overlaps.max(0)
        is_matched = overlap >= threshold
        best_anchors = overlaps.argmax(1)
        index[best_anchors] = torch.arange(len(boxes), device=index.device)
        is_matched.index_fill_(0, best_anchors, True)
        all_labels.append(labels[index].where(is_matched, 0))
        all_boxes.append(boxes[index].where(all_labels[-1][:, None] > 0, own))
    return torch.stack(all_boxes), torch.stack(all_labels)


def _encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Boxes [..., 4] as seen from their anchors: how far the centers are apart, and the logarithms of the ratios."""
    (centers, sizes), (from_centers, from_sizes) = (
        ((corners[..., :2] + corners[..., 2:]) / 2, corners[..., 2:] - corners[..., :2]) for corners in (boxes, anchors)
    )
    return torch.cat([(centers - from_centers) / from_sizes, (sizes / from_sizes).log()], -1)


def _hard_negatives(errors: Tensor, positive: Tensor, ratio: float) -> Tensor:
    """The negative anchors [N, A] of the largest errors: in each image, `ratio` for each positive one."""
    hardest_first = errors.masked_fill(positive, -torch.inf).argsort(dim=1, descending=True, stable=True)
    ranks = hardest_first.argsort(1)
    return (ranks < ratio * positive.sum(1, keepdim=True)) & ~positive
