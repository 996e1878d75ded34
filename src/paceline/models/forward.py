"""A model asked for its outputs; that it cannot take what it is given is told as what a user can change."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.core.text import pluralize
from paceline.core.world import is_communication_error

_MISFITS = (RuntimeError, ValueError, IndexError, AssertionError)
_ABOUT_SHAPES = re.compile(r"\b(size|shape|dim|channel|clip|height|width|kernel)", re.IGNORECASE)
_TORCH = str(Path(torch.__file__).parent)


def call_model(model: nn.Module, images: Tensor) -> Any:
    """What the model gives for images [N, C, H, W] or clips [N, C, T, H, W].

    A shape that the model cannot take is a RecipeError. Whatever else fails, memory or another process, is left as
    it is, since those who handle it look for it.
    """
    try:
        return model(images)
    except _MISFITS as error:
        is_the_machines = isinstance(error, torch.OutOfMemoryError) or is_communication_error(error)
        if is_the_machines or not _ABOUT_SHAPES.search(str(error)):
            raise
        raise RecipeError(f"model: cannot take {_described(images)}: {_reason(error, model, images)}") from error


def _described(images: Tensor) -> str:
    height, width = images.shape[-2:]
    if images.ndim == 5:
        frames = pluralize(images.shape[2], "frame")
        return f"{pluralize(len(images), 'clip')} of {frames} of {width}×{height} pixels"
    return f"{pluralize(len(images), 'image')} of {width}×{height} pixels"


def _reason(error: Exception, model: nn.Module, images: Tensor) -> str:
    """What was said. Where torch said it, also by which line of the model it was asked, and what can be done."""
    said = str(error).strip().split("\n")[0].rstrip(".;")
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and not frames[-1].filename.startswith(_TORCH):
        return said  # a model's own words
    place = [frame for frame in frames if not frame.filename.startswith(_TORCH)][-1]
    where = "" if place.filename == __file__ else f" ({Path(place.filename).name}, line {place.lineno})"
    return f"{said}{where}; {_advice(said, model, images)}"


def _advice(said: str, model: nn.Module, images: Tensor) -> str:
    if "more than 1 value per channel" in said:
        return (
            "give it larger images, or at least 2 samples at a time (data.batch_size, train.micro_batch_size, and"
            " data.drop_last for the last step of an epoch)"
        )
    resized = _advice_on_size(model, images)
    return f"{resized}change the size or the number of frames in data's transforms, or take another model"


def _advice_on_size(model: nn.Module, images: Tensor) -> str:
    """How a model of timm that is made for one size is made for that of the images; nothing for other models."""
    for name, module in model.named_modules():
        described: Any = getattr(module, "pretrained_cfg", None)
        if isinstance(described, dict) and described.get("fixed_input_size"):
            key = "model.backbone_args" if "backbone" in name.split(".") else "model.args"
            height, width = images.shape[-2:]
            size = height if height == width else [height, width]
            return f"make it for this size, {key}: {{img_size: {size}}}, "
    return ""
