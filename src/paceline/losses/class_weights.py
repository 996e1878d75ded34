"""Class weights of a recipe, and the precision in which losses are summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.core.text import pluralize
from paceline.core.world import constant


class ClassWeights:
    """One weight for each class; `argument` is the key that messages name."""

    def __init__(self, argument: str, values: Sequence[float]) -> None:
        self.argument = argument
        self.values = values

    def to(self, logits: Tensor) -> Tensor:
        """The weights [C] on the device and in the dtype of `logits` [N, C, ...]."""
        if len(self.values) != logits.shape[1]:
            raise self._mismatch(f"the model outputs {pluralize(logits.shape[1], 'class')}")
        return constant(self.values, logits.device, logits.dtype)

    def sum_over_labels(self, labels: Tensor) -> Tensor:
        """The sum of the weights of class ids [N]; on a device it stays there."""
        try:
            return self._exact(labels.device)[labels].sum()
        except IndexError:
            raise self._mismatch(f"a sample has class {int(labels.max())}, counted from 0") from None

    def sum_over_counts(self, counts: Tensor) -> Tensor:
        """The sum of the weights, each times its count in `counts` [C]; on a device it stays there."""
        if len(self.values) != len(counts):
            raise self._mismatch(f"the data have {pluralize(len(counts), 'class')}")
        return (counts * self._exact(counts.device)).sum()

    def _exact(self, device: torch.device) -> Tensor:
        return constant(self.values, device, torch.float32 if device.type == "mps" else torch.float64)

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
