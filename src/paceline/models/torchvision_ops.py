"""Importing torchvision beside a torch build that its compiled operators do not fit.

The registry's torchvision wheel is built for CUDA. Beside a CPU build of torch its operators do not load, and
`import torchvision` fails because it describes operators that do not exist. Declaring those two lets the import
pass; models, transforms and losses work. Calling them still fails, as it should.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

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
    return importlib.import_module("torchvision")


def _declare_missing(*names: str) -> None:
    if _declared:
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in names:
        library.define(f"{name}{_SCHEMA}")  # type: ignore[no-untyped-call]
    _declared.append(library)
