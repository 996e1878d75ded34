"""Errors of models in words that a user can act on: inputs that a model cannot take, and models too large to build."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.contracts import relative_path
from paceline.core.errors import PacelineError, RecipeError, TrainingError
from paceline.core.process import free_memory
from paceline.core.text import pluralize
from paceline.core.user_code import described, is_ours, is_own
from paceline.core.world import is_communication_error

_SHAPE_ERRORS = (RuntimeError, ValueError, IndexError, AssertionError)
_MISTAKES = (AttributeError, NameError, TypeError, LookupError, ArithmeticError, ValueError, AssertionError)
_SHAPE_WORDS = re.compile(r"\b(size|shape|dim|channel|clip|height|width|kernel)|selected index k", re.IGNORECASE)
_TOO_SMALL = re.compile(
    r"greater than actual input|3D \(unbatched\) or 4D|output size is too small|less than the corresponding input dim",
    re.I,
)
_UNEQUAL = re.compile(r"must match the size of tensor|Sizes of tensors must match")
_TORCH, _ENGINE = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent.parent / 'engine'}/"


def call_model(model: nn.Module, images: Tensor, *others: Any, **options: Any) -> Any:
    """The model's output for images [N, C, H, W] or clips [N, C, T, H, W], and what else it takes.

    A shape that the model cannot take is a RecipeError, a mistake in a user's model a TrainingError. Other errors, such
    as out of memory or a lost process, are raised unchanged for those who handle them.
    """
    try:
        output = model(images, *others, **options)
    except (*_SHAPE_ERRORS, *_MISTAKES) as error:
        if isinstance(error, torch.OutOfMemoryError | PacelineError) or is_communication_error(error):
            raise
        if isinstance(error, _SHAPE_ERRORS) and _SHAPE_WORDS.search(str(error)):
            raise RecipeError(f"model: cannot take {_describe(images)}: {_explain(error, model, images)}") from error
        if isinstance(error, _MISTAKES) and not is_ours(_class(model)):
            raise TrainingError(f"model {_class(model).__name__}: {described(error)}") from error
        raise
    if output is None:
        raise TrainingError(f"model {_class(model).__name__}: forward gave None; return its output")
    return output


def _class(model: nn.Module) -> type[nn.Module]:
    """The class of a model, or of the one that a strategy wraps."""
    inner = getattr(model, "module", None)
    return type(inner if isinstance(inner, nn.Module) else model)


def _describe(images: Tensor) -> str:
    height, width = images.shape[-2:]
    if images.ndim == 5:
        frames = pluralize(images.shape[2], "frame")
        return f"{pluralize(len(images), 'clip')} of {frames} of {width}×{height} pixels"
    return f"{pluralize(len(images), 'image')} of {width}×{height} pixels"


def _explain(error: Exception, model: nn.Module, images: Tensor) -> str:
    """The message; if torch raised it, also the model's line and what to change."""
    message = str(error).strip().split("\n")[0].rstrip(".;")
    frames = list(traceback.walk_tb(error.__traceback__))
    inside = [each for each in frames[1:] if not each[0].f_code.co_filename.startswith((_TORCH, _ENGINE))]
    places = [each for each in inside if each[0].f_code.co_name != "__torch_dispatch__"]  # of a mode around the model
    # Without a place, all layers are torch's, and the user put them together.
    is_users, where = not places, ""
    if places:
        frame, line = places[-1]
        is_users, file = is_own(frame), frame.f_code.co_filename
        where = f" ({relative_path(file) if is_users else Path(file).name}, line {line})"
    if isinstance(error, ValueError) and not frames[-1][0].f_code.co_filename.startswith(_TORCH):
        return message + where * is_users  # the model's own
    misfit = _misfit([frame for frame, _ in frames], model) if is_users else None
    return f"{message}{where}; {_advice(message, model, images, misfit)}"


def _misfit(frames: list[FrameType], model: nn.Module) -> str:
    """What does not fit where a user's model failed: a layer of torch's or, if none was called, the line."""
    modules = [each for frame in frames if isinstance(each := frame.f_locals.get("self"), nn.Module)]
    layer = modules[-1] if modules else model
    if not type(layer).__module__.startswith("torch.nn"):
        return "the sizes in this line do not fit: correct them"
    name = next((name for name, module in model.named_modules() if module is layer), "").removeprefix("module.")
    return f"the sizes of {name or 'the model'}, {type(layer).__name__}({layer.extra_repr()}), do not fit: correct them"


def _advice(message: str, model: nn.Module, images: Tensor, misfit: str | None) -> str:
    """What to change: about images where that may help, else about what does not fit."""
    if re.search(rf"to have \d+ channels, but got {images.shape[1]} channels", message):
        return f"images have {pluralize(images.shape[1], 'channel')}: build the model with in_channels"
    if "more than 1 value per channel" in message:
        return (
            "use larger images, or at least 2 samples at a time (data.batch_size, train.micro_batch_size, and"
            " data.drop_last for the last step of an epoch)"
        )
    if misfit and not _TOO_SMALL.search(message):
        strides = ", or use images whose sides the model's strides divide" if _UNEQUAL.search(message) else ""
        return misfit + strides
    if "selected index k" in message:  # of transformers, which keep as many positions as they have queries
        return "images have fewer positions than the model has queries: lower model.args.num_queries, or enlarge them"
    return (
        f"{_image_size_hint(model, images)}change the size or the number of frames in data's transforms, or use"
        " another model"
    )


def _image_size_hint(model: nn.Module, images: Tensor) -> str:
    """How to build a timm model of fixed input size for these images; empty for other models."""
    for name, module in model.named_modules():
        config: Any = getattr(module, "pretrained_cfg", None)
        if isinstance(config, dict) and config.get("fixed_input_size"):
            key = "model.backbone_args" if "backbone" in name.split(".") else "model.args"
            height, width = images.shape[-2:]
            size = height if height == width else [height, width]
            return f"build it for this size with {key}: {{img_size: {size}}}, "
    return ""


_ALLOCATION = re.compile(r"tried to allocate (\d+) bytes")


def is_allocation_error(error: Exception) -> bool:
    """Whether torch could not reserve memory."""
    return isinstance(error, RuntimeError) and _ALLOCATION.search(str(error)) is not None


@contextmanager
def explained_allocation() -> Iterator[None]:
    """Raise a ValueError that names both numbers where a model asks for more memory than there is."""
    try:
        yield
    except RuntimeError as error:
        if found := _ALLOCATION.search(str(error)):
            asked, free = int(found[1]) / 1e9, free_memory() / 1e9
            what = f"needs more than {asked:.3g} GB for its parameters, and {free:.3g} GB of memory are free"
            raise ValueError(f"{what}; build a smaller model") from error
        raise
