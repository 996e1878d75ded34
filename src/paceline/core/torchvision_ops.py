"""Importing torchvision beside a torch build that its compiled operators do not fit.

The registry's torchvision wheel is built for CUDA. Beside a CPU build of torch its operators do not load, and
`import torchvision` fails because it describes operators that do not exist. Declaring those two lets the import
pass; models, transforms and losses work. The two operators that detectors need are then those below.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # a library that is garbage collected takes its operators with it


def import_torchvision() -> ModuleType:
    """The torchvision package, imported in a way that works with and without its compiled operators."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    _declare_missing("nms", "qnms")
    torchvision = importlib.import_module("torchvision")
    # It refuses to call operators that its own library did not bring, also where they are there.
    torchvision.ops.boxes._assert_has_ops = lambda: None
    torchvision.ops.poolers.roi_align = roi_align  # its own is compiled by torch.compile, for minutes
    return torchvision


def _declare_missing(*names: str) -> None:
    if _declared:
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in names:
        library.define(f"{name}{_SCHEMA}")  # type: ignore[no-untyped-call]
    library.impl("nms", nms, "CPU")  # type: ignore[no-untyped-call]
    _declared.append(library)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The indices of boxes [K, 4] that overlap no better one by more than the threshold, the best first.

    OpenCV compares in float64 and is compiled: 2,000 boxes take milliseconds. Equal scores keep their order.
    """
    order = np.argsort(-scores.detach().numpy(), kind="stable")
    corners = boxes.detach().double().numpy()[order]
    extents = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1)
    ranks = np.arange(len(order), 0, -1, dtype=np.float32)  # OpenCV takes no negative scores
    kept = np.asarray(cv2.dnn.NMSBoxes(extents, ranks, 0.0, iou_threshold), dtype=np.int64).ravel()  # type: ignore[arg-type]
    return torch.from_numpy(order[kept])


def roi_align(
    features: Tensor, rois: Tensor, output_size: Sequence[int], spatial_scale: float, sampling_ratio: int
) -> Tensor:
    """RoI Align of regions [K, 5], the number of the image and x1 y1 x2 y2: [K, C, *output_size].

    Each bin is the mean of sampling_ratio² values, interpolated between the pixels of features [N, C, H, W].
    """
    height, width = features.shape[-2:]
    rows, columns = (size * sampling_ratio for size in output_size)
    left, top, right, bottom = (rois[:, 1:].float() * spatial_scale).unbind(1)
    down, across = (bottom - top).clamp(min=1.0), (right - left).clamp(min=1.0)
    y = top[:, None] + (torch.arange(rows, device=rois.device) + 0.5) * down[:, None] / rows  # [K, rows]
    x = left[:, None] + (torch.arange(columns, device=rois.device) + 0.5) * across[:, None] / columns
    inside = ((y >= -1) & (y <= height))[:, :, None] & ((x >= -1) & (x <= width))[:, None]
    grid = torch.stack(
        [
            (x.clamp(0, width - 1) * (2 / max(width - 1, 1)) - 1)[:, None].expand(-1, rows, -1),
            (y.clamp(0, height - 1) * (2 / max(height - 1, 1)) - 1)[:, :, None].expand(-1, -1, columns),
        ],
        -1,
    )
    pooled = features.new_zeros(len(rois), features.shape[1], *output_size)
    for index, image in enumerate(features):
        own = (rois[:, 0] == index).nonzero().flatten()
        if len(own):
            points = grid[own].view(1, -1, columns, 2).to(features.dtype)
            values = F.grid_sample(
                image[None], points, padding_mode="border", align_corners=True
            )  # [1, C, K·rows, columns]
            values = values.view(-1, len(own), rows, columns).transpose(0, 1) * inside[own, None]
            pooled = pooled.index_copy(0, own, F.avg_pool2d(values, sampling_ratio))
    return pooled
