"""Losses as users have them: any module or function `(output, target) → number`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError, TrainingError
from paceline.core.signatures import signature_of
from paceline.core.user_code import user_code
from paceline.data.batch import IMAGE_SIZE, Batch, crop_padding, describe_tensor
from paceline.losses.class_weights import to_full_precision
from paceline.losses.loss_term import Loss, LossTerm

_DIVISION = {
    "mean": "the mean of a micro-batch counts by its number of samples",
    "sum": "the sum over all micro-batches is divided by the number of samples",
    "none": "each sample's mean is summed, and divided by the number of samples",
}


Pair = Callable[[Any, Batch], tuple[Any, Any]]
"""What a user's loss or metric is given, of a task's outputs for a batch and the batch: an output and its target."""


def output_and_target(outputs: Any, batch: Batch) -> tuple[Any, Any]:
    """The outputs as they are, beside the batch's target."""
    return outputs, batch.target


class Criterion:
    """A module or function `(output, target) → number` as a loss of what the task gives and the batch's target.

    The denominator is the number of samples. The numerator is, by the criterion's `reduction`:

    - `mean` (the default): its value times the samples of the micro-batch. Where every sample counts alike, the step
      is the same however it is divided. A criterion that divides by something else, class weights or pixels that are
      not ignored, is averaged over micro-batches by their samples: it depends on `train.micro_batch_size`.
    - `sum`: its value.
    - `none`: the sum over samples of each one's mean.
    """

    ignores_model = False
    """Whether its last value had no gradient although the output had one."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self.pair: Pair = output_and_target
        self.reduction = _reduction(function)
        if self.reduction not in _DIVISION:
            raise RecipeError(f"loss {name}: expected reduction mean, sum or none, got {self.reduction!r}")

    def describe(self) -> str:
        """How it is divided over micro-batches and processes."""
        advice = "; exact where every sample counts alike" if self.reduction == "mean" else ""
        return f"loss {self.name}: {_DIVISION[self.reduction]}{advice}"

    def count(self, batch: Batch) -> float:
        return float(batch.size)

    def __call__(self, outputs: Any, batch: Batch) -> LossTerm:
        output, target = self.pair(outputs, batch)
        if IMAGE_SIZE in batch and isinstance(output, Tensor) and output.shape[-2:] == batch["image"].shape[-2:]:
            pairs = zip(output[:, None], target[:, None], strict=True)  # of each image without its padding
            cropped = [[crop_padding(planes, batch, index) for planes in pair] for index, pair in enumerate(pairs)]
            return LossTerm(torch.stack([self._sum(own, mask, 1) for own, mask in cropped]).sum(), float(batch.size))
        return LossTerm(self._sum(output, target, batch.size), float(batch.size))

    def _sum(self, output: Any, target: Any, samples: int) -> Tensor:
        """The numerator for some samples."""
        if isinstance(output, Tensor):
            output = to_full_precision(output)
            target = comparable(target, output)
            if isinstance(self.function, nn.Module):
                self.function.to(output.device)
        with user_code(f"loss {self.name}", note=lambda: compared(output, target)):
            value = self.function(output, target)
        if isinstance(output, Tensor) and isinstance(value, Tensor) and output.requires_grad:
            self.ignores_model = not value.requires_grad
        return self._numerator(value, samples)

    def _numerator(self, value: Any, samples: int) -> Tensor:
        if not isinstance(value, Tensor):
            cure = "; do not call .item()" if isinstance(value, int | float) else ""
            found = type(value).__name__
            raise TrainingError(f"loss {self.name}: gave {found}, expected a tensor with one number{cure}")
        if value.is_complex():
            raise TrainingError(
                f"loss {self.name}: gave {describe_tensor(value)}, expected a real number: take its .abs()"
            )
        if value.ndim == 0 and self.reduction != "none":
            return value * samples if self.reduction == "mean" else value
        if value.ndim > 0 and self.reduction == "none" and len(value) == samples:
            return value.flatten(1).mean(1).sum() if value.ndim > 1 else value.sum()
        expected = "one number a sample" if self.reduction == "none" else "one number: return loss.mean()"
        raise TrainingError(f"loss {self.name}: gave a tensor of shape {list(value.shape)}, expected {expected}")


class StatefulCriterion(Criterion):
    """A module with parameters or buffers: they are saved and resumed with the run."""

    function: nn.Module

    def state_dict(self) -> dict[str, Tensor]:
        return self.function.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.function.load_state_dict(state)


def as_loss(name: str, made: Any) -> Loss:
    """What was registered as a loss, if it has `count`; else the criterion that it is."""
    if hasattr(made, "count"):
        loss: Loss = made
        return loss
    if not callable(made):
        found = "nothing" if made is None else type(made).__name__
        raise RecipeError(f"loss {name}: its function gave {found}, expected a module or a function (output, target)")
    if isinstance(made, nn.Module) and made.state_dict():
        if any(parameter.requires_grad for parameter in made.parameters()):
            raise RecipeError(f"loss {name}: has parameters, which no optimizer sees; make them part of the model")
        return StatefulCriterion(name, made)
    return Criterion(name, made)


def comparable(target: Any, output: Tensor) -> Any:
    """A target beside an output: of its shape if they differ in dimensions of size 1 alone, and of a type to compare.

    Whole numbers of the output's shape become floats, class numbers int64.
    """
    if not isinstance(target, Tensor):
        return target
    target = same_shape(target, output)
    if target.is_floating_point():
        return target.to(output.dtype) if output.is_floating_point() else target
    return target.to(output.dtype) if target.shape == output.shape else target.long()


def compared(output: Any, target: Any) -> str:
    """What a loss was given, and what is wrong with it as far as shapes and types tell."""
    if isinstance(output, tuple | list):
        return f" (output {type(output).__name__}); return one tensor from the model's forward, or write a task"
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return ""
    return f" (output {describe_tensor(output)}, target {describe_tensor(target)}){_cure(output, target)}"


def _cure(output: Tensor, target: Tensor) -> str:
    if output.ndim < 2 or not target.numel():
        return ""
    width = output.shape[1]
    if output.ndim > 2 and target.ndim == 1:
        return f"; for a label a sample, the model must give [N, {width}]: flatten its output"
    is_class = target.ndim == output.ndim - 1 and not target.is_floating_point() and target.device.type == "cpu"
    if is_class and not 0 <= int(target.min()) <= int(target.max()) < width:
        return (
            f"; labels are from {int(target.min())} to {int(target.max())}, expected 0 to {width - 1}: the model has"
            f" {width} outputs"
        )
    if output.ndim > 2:
        return ""
    if not target.is_floating_point() and target.ndim == 2 and target.shape[1] == 1:
        return "; a label is one whole number: return int(label) from the data set"
    if target.ndim == 1 and target.is_floating_point() and width > 1:
        return "; for classes, return int(label) from the data set; for a number, set model.num_classes: 1"
    if target.ndim == 2 and target.shape[1] != width:
        return f"; the model gives {width} numbers a sample: set model.num_classes: {target.shape[1]}"
    return ""


def same_shape(target: Tensor, output: Tensor) -> Tensor:
    """The target in the output's shape if they differ in dimensions of size 1 alone, else as it is.

    Beside [N, 1], a target [N] would be compared as [N, N].
    """
    if target.shape == output.shape or target.numel() != output.numel() or target.shape[:1] != output.shape[:1]:
        return target
    without_ones = [[side for side in each.shape if side != 1] for each in (target, output)]
    return target.reshape(output.shape) if without_ones[0] == without_ones[1] else target


def _reduction(function: Callable[..., Any]) -> str:
    """The `reduction` of a module, or the default of a function's parameter; `mean` without one."""
    if isinstance(function, partial) and "reduction" in function.keywords:
        return str(function.keywords["reduction"])
    if (found := getattr(function, "reduction", None)) is not None:
        return str(found)
    if isinstance(function, partial):
        return _reduction(function.func)
    parameter = None if isinstance(function, nn.Module) else signature_of(function).parameters.get("reduction")
    return "mean" if parameter is None or parameter.default is parameter.empty else str(parameter.default)
