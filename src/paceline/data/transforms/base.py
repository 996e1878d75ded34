"""What is done to images between the data set and the model, in two kinds.

Sample transforms work on one sample in the loader's workers, until all images have one size. Batch transforms
then work on whole batches, on the training device. Neither draws random numbers itself: each says how many it
wants for a sample (`draws`) and is given them, uniform in [0, 1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import TRUTHS, Sample


class SampleTransform(Protocol):
    """Changes one sample."""

    @property
    def draws(self) -> int:
        """How many random numbers it wants for a sample."""
        ...

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        """The changed sample, from `draws` [self.draws]; the given one stays as it is."""
        ...


class BatchTransform(Protocol):
    """Changes a batch; its `is_batch` is True, which transforms of samples need not have.

    One whose attribute `per_step` is True is given one row of draws for all that a step computes, whatever process
    computes it; any other a row for each sample. One whose attribute `keeps_counts` is True changes no label, and not
    how many pixels of a mask are of which class; after any other, what losses are divided by is counted again.
    """

    @property
    def draws(self) -> int:
        """How many random numbers it wants for a sample, or for a step."""
        ...

    @property
    def is_batch(self) -> bool:
        """Whether it works on batches, not on samples."""
        ...

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The changed batch, from `draws` [N or 1, self.draws]; the given one and its tensors stay as they are."""
        ...


class EitherTransform(BatchTransform, Protocol):
    """A batch transform that can also change single samples, in the same way for the same draws.

    One whose attribute `unifies_size` is True brings images of any size to one.
    """

    def on_sample(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        """The changed sample, from `draws` [self.draws]; the given one stays as it is."""
        ...


@dataclass(frozen=True)
class OnSamples:
    """A transform of either kind, used on single samples."""

    transform: EitherTransform

    @property
    def draws(self) -> int:
        """As many as on batches."""
        return self.transform.draws

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        return self.transform.on_sample(sample, draws)


@dataclass(frozen=True)
class KeepOriginal:
    """Adds "matrix", which maps the final image back to the one that was read; keeps masks and boxes under `TRUTHS`.

    It comes first where `evaluate.original_size` holds: predictions are measured and saved in the pixels of the image
    as it was read. A batch holds truths as a list, since images differ in size.
    """

    draws: ClassVar[int] = 0
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        if "mask" not in sample and "boxes" not in sample:
            raise DataError("evaluate.original_size needs masks or boxes, and these samples have none; set it to false")
        kept = {truth: sample[name] for name, truth in TRUTHS.items() if name in sample}
        return {**sample, **kept, "matrix": np.eye(2, 3, dtype=np.float32)}


def split(
    transforms: Sequence[SampleTransform | BatchTransform], have_one_size: bool = False
) -> tuple[list[SampleTransform], list[BatchTransform]]:
    """Decide which of a recipe's transforms run on samples, and which behind them on batches.

    What can run on either runs on batches, unless a sample transform follows, or it is what gives the images one size.
    With `have_one_size` they have one from the start, as far as no sample transform changes it.
    """
    first_sample = _first(not _is_batch(each) for each in transforms)
    first_batch = _first(_is_batch(each) and not _is_either(each) for each in transforms)
    unsized = range(first_sample if have_one_size else 0, first_batch)
    on_samples = [
        place
        for place, each in enumerate(transforms)
        if not _is_batch(each) or (place in unsized and _unifies_size(each))
    ]
    end = on_samples[-1] + 1 if on_samples else 0
    if end > first_batch:
        raise ValueError(_out_of_order(transforms[end - 1], transforms[first_batch]))
    samples = [OnSamples(each) if _is_either(each) else each for each in transforms[:end]]
    return [each for each in samples if _is_sample(each)], [each for each in transforms[end:] if _is_batch(each)]


def name_of(transform: SampleTransform | BatchTransform) -> str:
    """What recipes call a transform."""
    kind = type(transform.transform if isinstance(transform, OnSamples) else transform)
    names = [name for (_, name), definition in register.definitions.items() if definition.target is kind]
    return names[0] if names else re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _first(found: Iterable[bool]) -> int:
    """The place of the first True; behind all if there is none."""
    return [*found, True].index(True)


def _is_either(transform: SampleTransform | BatchTransform) -> TypeGuard[EitherTransform]:
    return hasattr(transform, "on_sample")


def _unifies_size(transform: SampleTransform | BatchTransform) -> bool:
    return getattr(transform, "unifies_size", False)


def _is_batch(transform: SampleTransform | BatchTransform) -> TypeGuard[BatchTransform]:
    return getattr(transform, "is_batch", False)


def _is_sample(transform: SampleTransform | BatchTransform) -> TypeGuard[SampleTransform]:
    return not _is_batch(transform)


def _out_of_order(late: SampleTransform | BatchTransform, early: SampleTransform | BatchTransform) -> str:
    moved, found = name_of(late), name_of(early)
    return (
        f"{moved} must come before {found}: it works on single images of any size, {found} on whole batches of one size"
    )
