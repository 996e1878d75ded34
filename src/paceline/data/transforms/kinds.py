"""What is done to images between the data set and the model, in two kinds.

Sample transforms work on one sample in the loader's workers, until all images have one size. Batch transforms
then work on whole batches, on the training device. Neither draws random numbers itself: each says how many it
wants for a sample (`draws`) and is given them, uniform in [0, 1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.batch import Sample


class _Transform(Protocol):
    @property
    def draws(self) -> int:
        """How many random numbers it wants for a sample."""
        ...

    @property
    def is_batch(self) -> bool:
        """Whether it works on batches, not on samples."""
        ...


class SampleTransform(_Transform, Protocol):
    """Changes one sample; its `is_batch` is False."""

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        """The changed sample, from `draws` [self.draws]; the given one stays as it is."""
        ...


class BatchTransform(_Transform, Protocol):
    """Changes a batch; its `is_batch` is True.

    One whose attribute `per_step` is True is given one row of draws for all that a step computes, whatever process
    computes it; any other a row for each sample. One whose attribute `keeps_counts` is True changes no label, and not
    how many pixels of a mask are of which class; after any other, what losses are divided by is counted anew.
    """

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The changed batch, from `draws` [N or 1, self.draws]; the given one and its tensors stay as they are."""
        ...


def split(
    transforms: Sequence[SampleTransform | BatchTransform],
) -> tuple[list[SampleTransform], list[BatchTransform]]:
    """Part a recipe's transforms by kind; all sample transforms come before the first batch transform."""
    samples: list[SampleTransform] = []
    batches: list[BatchTransform] = []
    for transform in transforms:
        if _is_batch(transform):
            batches.append(transform)
        elif _is_sample(transform):
            if batches:
                raise ValueError(_out_of_order(transform, batches[0]))
            samples.append(transform)
    return samples, batches


def _is_batch(transform: SampleTransform | BatchTransform) -> TypeGuard[BatchTransform]:
    return transform.is_batch


def _is_sample(transform: SampleTransform | BatchTransform) -> TypeGuard[SampleTransform]:
    return not transform.is_batch


def _out_of_order(late: SampleTransform, early: BatchTransform) -> str:
    moved, found = _recipe_name(late), _recipe_name(early)
    return (
        f"{moved} must come before {found}: it works on single images of any size, {found} on whole batches of one size"
    )


def _recipe_name(transform: SampleTransform | BatchTransform) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(transform).__name__).lower()
