"""Class weights of a recipe, and the precision in which losses are summed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.core.text import pluralize
from paceline.core.world import constant


class ClassWeights:
    """One weight for each class, cached on each device; `argument` is the key that messages name."""

    def __init__(self, argument: str, values: Sequence[float]) -> None:
        self.argument = argument
        self.values = values
        self._cache: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def to(self, logits: Tensor) -> Tensor:
        """The weights [C] on the device and in the dtype of `logits` [N, C, ...]."""
        key = (logits.device, logits.dtype)
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        if len(self.values) != logits.shape[1]:
            raise self._mismatch(f"the model outputs {pluralize(logits.shape[1], 'class')}")
        # Training refuses tensors that an evaluation made in inference mode.
        with torch.inference_mode(False):
            weights = constant(self.values, logits.device, logits.dtype)
        if type(logits) is Tensor:  # the weights of fake logits are fake too
            self._cache[key] = weights
        return weights

    def sum_over_labels(self, labels: Tensor) -> Tensor | float:
        """The sum of the weights of class ids [N]; on a device it stays there."""
        if labels.device.type != "cpu":
            return self._exact(labels.device)[labels].sum()
        try:
            return math.fsum(map(self.values.__getitem__, labels.tolist()))
        except IndexError:
            raise self._mismatch(f"a sample has class {int(labels.max())}, counted from 0") from None

    def sum_over_counts(self, counts: Tensor) -> Tensor | float:
        """The sum of the weights, each times its count in `counts` [C]; on a device it stays there."""
        if len(self.values) != len(counts):
            raise self._mismatch(f"the data have {pluralize(len(counts), 'class')}")
        if counts.device.type != "cpu":
            return (counts * self._exact(counts.device)).sum()
        return math.fsum(value * count for value, count in zip(self.values, counts.tolist(), strict=True))

    def _exact(self, device: torch.device) -> Tensor:
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return constant(self.values, device, dtype)

    def _mismatch(self, found: str) -> RecipeError:
        return RecipeError(
            f"{self.argument}: got {pluralize(len(self.values), 'number')}, but {found}; give one number for each class"
        )


def make_class_weights(argument: str, values: Sequence[float] | None) -> ClassWeights | None:
    """The weights, or None where a recipe gives none."""
    return None if values is None else ClassWeights(argument, values)


def to_full_precision(outputs: Tensor) -> Tensor:
    """Half-precision outputs as float32, others unchanged; a sum of half-precision losses keeps two or three digits."""
    if not isinstance(outputs, Tensor):
        raise RecipeError(
            f"model: gave {type(outputs).__name__}, but this loss expects a tensor; return one, or use your own loss"
        )
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
