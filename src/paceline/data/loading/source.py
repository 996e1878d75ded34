"""Samples of one split as batches: read, changed by their transforms, stacked, and made ready on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core.counting import counted
from paceline.core.errors import DataError
from paceline.data.batch import Batch, Sample
from paceline.data.keys import uniforms, uniforms_of_streams
from paceline.data.loading.preparing import Draws, Preparation
from paceline.data.loading.stacking import Ids, Stack, stack
from paceline.data.skipping import UNREADABLE, SkipList, Skipped, described
from paceline.data.transforms.kinds import BatchTransform, SampleTransform, split

# Samples are worked on side by side; threads that share one image would only get into their way, and after a process
# is forked they are gone.
cv2.setNumThreads(0)


class Request(NamedTuple):
    """Samples that are wanted together."""

    epoch: int
    ids: Ids


class Choice(NamedTuple):
    """What reads samples ahead, and how many of them."""

    kind: Literal["thread", "process"]
    workers: int


class Dataset(Protocol):
    """Samples by number, and what a model must know of them.

    Some have more: `path(index)`, the file that messages about a sample name; `open(index)`, like `read` but with the
    image still `Encoded`; `joints`, the names of keypoints; `notes`, what was found odd when the index was read.
    Several threads read at once.
    """

    classes: list[str]
    channels: int

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """Sample `index`, unchanged."""
        ...


class Source:
    """A data set with its transforms. What is random about a sample depends on (seed, epoch, sample) alone.

    With `skips`, samples that cannot be read are left out and listed there; without, the first one is a DataError.
    """

    def __init__(
        self,
        dataset: Dataset,
        transforms: Sequence[SampleTransform | BatchTransform],
        seed: int,
        skips: SkipList | None = None,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.skips = skips
        self.sample_transforms, self.batch_transforms = split(transforms)
        self._preparation = Preparation(dataset, self.sample_transforms, seed, None if skips is None else skips.limit)
        self._wanted = [0 if _is_per_step(each) else each.draws for each in self.batch_transforms]
        self._no_draws = [torch.empty(0, 0)] * len(self._wanted)
        self.keeps_counts = all(getattr(each, "keeps_counts", False) for each in self.batch_transforms)
        """Whether losses are divided by as much after the transforms of whole batches as before them."""
        self.choice: Choice | None = None
        """What was found to read its samples fastest, if that was measured."""
        self.in_memory = hasattr(dataset, "gather") and not self.sample_transforms
        """Whether batches are indexed as tensors, with no Python per sample."""

    def fetch(self, epoch: int, ids: Ids) -> Batch:
        """The samples `ids` as a batch on the host, before the transforms of whole batches."""
        if self.in_memory:
            try:
                return self._gather(ids)
            except UNREADABLE:
                if self.skips is None:
                    raise  # else one by one, to find out which
        draws = self._preparation.draw(epoch, ids)
        if self.skips is not None:
            return self._fetch_readable(epoch, ids, draws, self.skips.limit)
        together = Stack(len(ids))
        for index, drawn in zip(ids.tolist(), draws, strict=True):
            together.add(index, self._preparation.sample(epoch, index, drawn))
        return together.batch()

    def _gather(self, ids: Ids) -> Batch:
        gather: Callable[[Tensor], dict[str, Any]] = self.dataset.gather  # type: ignore[attr-defined]
        numbers = torch.from_numpy(ids)
        return Batch(id=numbers, **gather(numbers))

    def finish(self, batch: Batch, epoch: int, device: torch.device, step: int = 0) -> Batch:
        """The batch on the device, with the transforms of whole batches applied there; notes what it had to leave out.

        Raises DataError once more was left out than may be.
        """
        if batch.skipped and self.skips is not None:
            self.skips.note(batch.skipped)
        fields: dict[str, Any] = batch.to(device)
        drawn = self._draw(batch, epoch, device) if any(self._wanted) else self._no_draws
        for number, (transform, draws) in enumerate(zip(self.batch_transforms, drawn, strict=True)):
            fields = transform(fields, self._draw_for_step(step, number) if _is_per_step(transform) else draws)
        images = fields["image"]
        if images.dtype == torch.uint8:  # nothing normalised it: models take numbers from 0 to 1
            images = images.float().div_(255)
        ready = Batch(fields, image=images)
        ready.skipped, ready.is_stand_in = batch.skipped, batch.is_stand_in
        return ready

    def _draw(self, batch: Batch, epoch: int, device: torch.device) -> Sequence[Tensor]:
        """The random numbers of each transform of whole batches, all drawn at once."""
        first = len(self.sample_transforms)
        drawn = uniforms_of_streams(self.seed, epoch, batch.ids.numpy(), first, self._wanted)
        return torch.from_numpy(drawn).to(device).split_with_sizes(self._wanted, 1)

    def _draw_for_step(self, step: int, number: int) -> Tensor:
        """The random numbers of a transform that does the same to all that is computed in a step, [1, draws]."""
        stream = len(self.sample_transforms) + number
        # Steps count below zero where samples count from zero, so that no key is used twice.
        return torch.from_numpy(
            uniforms(self.seed, 0, np.array([-1 - step]), stream, self.batch_transforms[number].draws)
        )

    def _fetch_readable(self, epoch: int, ids: Ids, draws: Draws, limit: int) -> Batch:
        """Those of the samples that can be read; if there are none, the next one that can, as often as wanted.

        So a batch is never empty: a process can compute one that stands in for it, and keep step with the others.
        """
        together, skipped = Stack(len(ids)), []
        for index, drawn in zip(ids.tolist(), draws, strict=True):
            sample = self._try(epoch, index, drawn)
            if isinstance(sample, Skipped):
                skipped.append(sample)
            else:
                together.add(index, sample)
        batch = together.batch() if together else self._stand_in(epoch, ids, limit)
        if skipped:
            batch.skipped, batch.is_stand_in = skipped, not together
        return batch

    def _try(self, epoch: int, index: int, draws: npt.NDArray[np.float64]) -> Sample | Skipped:
        try:
            return self._preparation.sample(epoch, index, draws)
        except UNREADABLE as error:
            return described(self.dataset, index, error)

    def _stand_in(self, epoch: int, ids: Ids, limit: int) -> Batch:
        last: Sample | Skipped | None = None
        for further in range(1, limit + 2):
            index = (int(ids[-1]) + further) % len(self.dataset)
            last = self._try(epoch, index, self._preparation.draw(epoch, np.array([index]))[0])
            if not isinstance(last, Skipped):
                return stack(np.full(len(ids), index), [last] * len(ids))
        raise DataError(
            f"more than {counted(limit, 'sample')} in a row cannot be read, which is what data.max_skipped allows in"
            f" all; {last}"
        )


def _is_per_step(transform: BatchTransform) -> bool:
    return getattr(transform, "per_step", False)
