"""What is done to images between the data set and the model, in two kinds.

Sample transforms work on one sample in the loader's workers, until all images have one size. Batch transforms
then work on whole batches, on the training device. Neither draws random numbers itself: each says how many it
wants for a sample (`draws`) and is given them, uniform in [0, 1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

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
    how many pixels of a mask are of which class; after any other, what losses are divided by is counted again. One
    whose attribute `keeps_padding` is True moves no pixels, so that it may work on images of different sizes, which are
    padded; with any other, such batches are refused.

    One that has a method `on_sample(sample, draws)` can also change single samples, in the same way for the same draws.
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


Transform = SampleTransform | BatchTransform


@dataclass(frozen=True)
class OnSamples:
    """A transform that has `on_sample`, used on single samples."""

    transform: Any

    @property
    def draws(self) -> int:
        """As many as on batches."""
        draws: int = self.transform.draws
        return draws

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        changed: Sample = self.transform.on_sample(sample, draws)
        return changed


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
    transforms: Sequence[Transform], have_one_size: bool = False
) -> tuple[list[SampleTransform], list[BatchTransform]]:
    """Decide which of a recipe's transforms run on samples, and which behind them on batches.

    Those of data in memory, with `have_one_size`, all run on batches if they can. Else what can run on either runs on
    samples, unless it comes behind a transform of batches alone.
    """
    is_batch = [getattr(each, "is_batch", False) for each in transforms]
    if have_one_size and all(is_batch):
        return [], cast(list[BatchTransform], list(transforms))
    is_either = [hasattr(each, "on_sample") for each in transforms]
    end = [*(each and not either for each, either in zip(is_batch, is_either, strict=True)), True].index(True)
    late = next((each for each, works in zip(transforms[end:], is_batch[end:], strict=True) if not works), None)
    if late is not None:
        early = name_of(transforms[end])
        works_on = f"it works on single images of any size, {early} on whole batches of one size"
        raise ValueError(f"{name_of(late)} must come before {early}: {works_on}")
    samples = [OnSamples(each) if either else each for each, either in zip(transforms[:end], is_either, strict=False)]
    return cast(list[SampleTransform], samples), cast(list[BatchTransform], list(transforms[end:]))


def name_of(transform: Transform) -> str:
    """What recipes call a transform."""
    kind = type(transform.transform if isinstance(transform, OnSamples) else transform)
    names = [name for (_, name), definition in register.definitions.items() if definition.target is kind]
    return names[0] if names else re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
