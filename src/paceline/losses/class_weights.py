"""Numbers that a recipe gives for each class, and the precision in which losses are summed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.core.text import pluralize


class ClassNumbers:
    """One number for each class, kept on the devices where outputs were seen."""

    def __init__(self, argument: str, values: Sequence[float]) -> None:
        self.argument = argument
        self.values = values
        self._placed: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def beside(self, logits: Tensor) -> Tensor:
        """The numbers as a tensor like `logits` [N, C, ...]; that there is one for each class is checked once."""
        place = (logits.device, logits.dtype)
        placed = self._placed.get(place)
        if placed is not None:
            return placed
        if len(self.values) != logits.shape[1]:
            raise self._misfit(f"the model tells {pluralize(logits.shape[1], 'class')} apart")
        # Made in an evaluation it has to serve training too, which refuses tensors of the inference mode.
        with torch.inference_mode(False):
            placed = torch.tensor(self.values, device=logits.device, dtype=logits.dtype)
        # A dry run has fake logits, and what is made there is fake too: never to be met by a real step.
        if type(logits) is Tensor:
            self._placed[place] = placed
        return placed

    def total(self, labels: Tensor) -> float:
        """The sum of the numbers of the classes `labels`."""
        try:
            return math.fsum(map(self.values.__getitem__, labels.tolist()))
        except IndexError:
            raise self._misfit(f"there is a sample of class {int(labels.max())}, counted from 0") from None

    def weighted(self, counts: Tensor) -> float:
        """The sum of the numbers, each as often as `counts` [C] says."""
        if len(self.values) != len(counts):
            raise self._misfit(f"the data have {pluralize(len(counts), 'class')}")
        return math.fsum(value * count for value, count in zip(self.values, counts.tolist(), strict=True))

    def _misfit(self, found: str) -> RecipeError:
        return RecipeError(
            f"{self.argument}: got {pluralize(len(self.values), 'number')}, but {found}; give one number for each class"
        )


def full_precision(outputs: Tensor) -> Tensor:
    """Half-precision outputs as float32, others as they are."""
    # A sum of many half-precision losses would keep two or three digits.
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
