"""Importing torchvision beside a torch build that its compiled operators do not fit.

The registry's torchvision wheel is built for CUDA. Beside a CPU build of torch its operators do not load, and
`import torchvision` fails because it describes operators that do not exist. Declaring those two lets the import
pass; models, transforms and losses work. Non-maximum suppression is then the one below, RoI Align torchvision's own in
Python.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import torch
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
    # Its RoI Align in Python would be compiled by torch.compile, for minutes.
    module: Any = importlib.import_module("torchvision.ops.roi_align")
    module._roi_align = module._roi_align.__wrapped__
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
