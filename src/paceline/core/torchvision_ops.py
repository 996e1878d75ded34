"""Importing torchvision beside a torch build that its compiled operators do not fit.

The registry's torchvision wheel is built for CUDA. Beside a CPU build of torch its operators do not load, and
`import torchvision` fails because it describes operators that do not exist. Declaring those two lets the import
pass; models, transforms and losses work. Non-maximum suppression and RoI Align are then those below.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

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
    module: Any = importlib.import_module("torchvision.ops.roi_align")
    # Its own in Python would be compiled by torch.compile, for minutes.
    module._roi_align = partial(roi_align, module._roi_align.__wrapped__)
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
    order = np.argsort(-scores.detach().float().numpy(), kind="stable")
    corners = boxes.detach().double().numpy()[order]
    extents = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1)
    ranks = np.arange(len(order), 0, -1, dtype=np.float32)  # OpenCV takes no negative scores
    kept = np.asarray(cv2.dnn.NMSBoxes(extents, ranks, 0.0, iou_threshold), dtype=np.int64).ravel()  # type: ignore[arg-type]
    return torch.from_numpy(order[kept])


def roi_align(
    adaptive: Callable[..., Tensor],
    features: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Features [N, C, H, W] inside rois [K, 5], the number of an image and x1 y1 x2 y2: [K, C, height, width].

    By torch's kernel for sampling, in a fifth of the time of torchvision's code in Python, which is `adaptive`: for
    another number of samples in each bin.
    """
    if sampling_ratio <= 0:
        return adaptive(features, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned)
    corners = rois[:, 1:].float() * spatial_scale - (0.5 if aligned else 0.0)
    places = []
    for axis, (length, bins) in enumerate(zip(features.shape[:1:-1], (pooled_width, pooled_height), strict=True)):
        start, extent = corners[:, axis], corners[:, 2 + axis] - corners[:, axis]
        extent = extent if aligned else extent.clamp(min=1.0)
        shares = (torch.arange(bins * sampling_ratio, device=rois.device) + 0.5) / (bins * sampling_ratio)
        pixels = (start[:, None] + shares * extent[:, None]).clamp(0, length - 1)
        places.append((2 * pixels + 1) / length - 1)  # as `grid_sample` counts, from the edges
    across, down = places
    height, width = down.shape[1], across.shape[1]
    sides = across[:, None, :].expand(-1, height, -1), down[:, :, None].expand(-1, -1, width)
    grid = torch.stack(sides, -1)  # [K, height, width, 2]
    pooled = features.new_empty(len(rois), features.shape[1], pooled_height, pooled_width)
    for index in range(len(features)):
        own = (rois[:, 0] == index).nonzero().flatten()
        if not len(own):
            continue
        points, image = grid[own].flatten(0, 1)[None], features[index : index + 1].float()
        sampled = F.grid_sample(image, points, padding_mode="border", align_corners=False)  # [1, C, k · height, width]
        means = F.avg_pool2d(sampled, sampling_ratio)[0].view(-1, len(own), pooled_height, pooled_width).transpose(0, 1)
        pooled = pooled.index_copy(0, own, means.to(pooled.dtype))
    return pooled
