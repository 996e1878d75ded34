"""Samples of one split as batches: read, changed by their transforms, stacked, and made ready on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.batch import Batch, Sample
from paceline.data.keys import uniforms, uniforms_of_streams
from paceline.data.skipping import UNREADABLE, SkipList, Skipped
from paceline.data.transforms import BatchTransform, SampleTransform, split

Ids = npt.NDArray[np.int64]


class Dataset(Protocol):
    """Samples by number, and what a model must know of them."""

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
        self._wanted = [transform.draws for transform in self.batch_transforms]
        self._no_draws = [torch.empty(0, 0)] * len(self._wanted)
        self.in_memory = hasattr(dataset, "gather") and not self.sample_transforms
        """Whether batches are indexed as tensors, with no Python per sample."""

    def fetch(self, epoch: int, ids: Ids) -> Batch:
        """The samples `ids` as a batch on the host, before the transforms of whole batches."""
        if self.in_memory:
            gather: Callable[[Tensor], dict[str, Any]] = self.dataset.gather  # type: ignore[attr-defined]
            numbers = torch.from_numpy(ids)
            return Batch(id=numbers, **gather(numbers))
        if self.skips is not None:
            return self._fetch_readable(epoch, ids, self.skips.limit)
        return stack(ids, [self._read(epoch, int(index)) for index in ids])

    def finish(self, batch: Batch, epoch: int, device: torch.device) -> Batch:
        """The batch on the device, with the transforms of whole batches applied there; notes what it had to leave out.

        Raises DataError once more was left out than may be.
        """
        if batch.skipped and self.skips is not None:
            self.skips.note(batch.skipped)
        ready = batch.to(device)
        images = ready["image"]
        drawn = self._draw(batch, epoch, device) if any(self._wanted) else self._no_draws
        for transform, draws in zip(self.batch_transforms, drawn, strict=True):
            images = transform(images, draws)
        if images.dtype == torch.uint8:  # nothing normalised it: models take numbers from 0 to 1
            images = images.float().div_(255)
        ready["image"] = images
        return ready

    def _draw(self, batch: Batch, epoch: int, device: torch.device) -> Sequence[Tensor]:
        """The random numbers of each transform of whole batches, all drawn at once."""
        first = len(self.sample_transforms)
        drawn = uniforms_of_streams(self.seed, epoch, batch.ids.numpy(), first, self._wanted)
        return torch.from_numpy(drawn).to(device).split_with_sizes(self._wanted, 1)

    def _read(self, epoch: int, index: int) -> Sample:
        sample = self.dataset.read(index)
        for stream, transform in enumerate(self.sample_transforms):
            draws = uniforms(self.seed, epoch, np.array([index]), stream, transform.draws)[0]
            sample = transform(sample, draws)
        return sample

    def _fetch_readable(self, epoch: int, ids: Ids, limit: int) -> Batch:
        """Those of the samples that can be read; if there are none, the next one that can, as often as wanted.

        So a batch is never empty: a process can compute one that stands in for it, and keep step with the others.
        """
        tried = [self._try(epoch, int(index)) for index in ids]
        skipped = [each for each in tried if isinstance(each, Skipped)]
        samples = [each for each in tried if not isinstance(each, Skipped)]
        if not skipped:
            return stack(ids, samples)
        if samples:
            batch = stack(ids[[not isinstance(each, Skipped) for each in tried]], samples)
        else:
            batch = self._stand_in(epoch, ids, limit)
        batch.skipped, batch.is_stand_in = skipped, not samples
        return batch

    def _try(self, epoch: int, index: int) -> Sample | Skipped:
        try:
            return self._read(epoch, index)
        except UNREADABLE as error:
            return Skipped(index, *self._described(index, error))

    def _described(self, index: int, error: Exception) -> tuple[str | None, str]:
        """The file of a sample, if the data set says so, and a line on what is wrong with it."""
        find: Callable[[int], Any] | None = getattr(self.dataset, "path", None)
        path = str(find(index)) if find else None
        reason = " ".join(str(error).split()) or "no reason given"
        told = reason if isinstance(error, DataError) else f"{type(error).__name__}: {reason}"
        return path, told.removeprefix(f"{path}: ")

    def _stand_in(self, epoch: int, ids: Ids, limit: int) -> Batch:
        last: Sample | Skipped | None = None
        for further in range(1, limit + 2):
            index = (int(ids[-1]) + further) % len(self.dataset)
            last = self._try(epoch, index)
            if not isinstance(last, Skipped):
                return stack(np.full(len(ids), index), [last] * len(ids))
        raise DataError(
            f"more than {limit} samples in a row cannot be read, which is what data.max_skipped allows in all; {last}"
        )


def stack(ids: Ids, samples: Sequence[Sample]) -> Batch:
    """Samples of one size as a batch: images [N, C, H, W], numbers as int64 [N], arrays stacked."""
    fields: dict[str, Any] = {"id": torch.from_numpy(ids)}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if name == "image":
            fields[name] = _stack_images(ids, values)
        elif isinstance(values[0], int):
            fields[name] = torch.tensor(values)
        else:
            fields[name] = torch.from_numpy(np.stack(values))
    return Batch(fields)


def _stack_images(ids: Ids, images: list[npt.NDArray[np.uint8]]) -> Tensor:
    for index, image in zip(ids, images, strict=True):
        if image.shape != images[0].shape:
            raise DataError(
                f"samples {ids[0]} and {index} differ in size ({_size(images[0])} and {_size(image)}), so they cannot"
                " be stacked; add a transform that gives one size, such as {name: resize, size: [224, 224]}"
            )
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def _size(image: npt.NDArray[np.uint8]) -> str:
    return f"{image.shape[1]}×{image.shape[0]}"
