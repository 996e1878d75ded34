"""One split as batches: samples are read, transformed, collated, and finished on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import cv2
import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DamagedFileError, DataError
from paceline.core.text import pluralize
from paceline.core.user_code import named_error
from paceline.data.batch import IMAGE_SIZE, Batch, Collator, Ids, Sample, as_arrays, as_images, collate
from paceline.data.padding import Padding, clear_padding
from paceline.data.rng import as_float32, uniforms, uniforms_of_streams
from paceline.data.skip_list import UNREADABLE, SkipList, Skipped, as_skipped, locate_error
from paceline.data.transforms.base import BatchTransform, SampleTransform, name_of, split

# Samples are worked on side by side; threads that share one image would only get into their way, and after a process
# is forked they are gone.
cv2.setNumThreads(0)


LabelCheck = Callable[[Batch], tuple[int, str] | None]
"""Looks at a batch on the host: the first sample that losses cannot be computed for, and why."""


class Request(NamedTuple):
    """The samples of one batch."""

    epoch: int
    ids: Ids


class Dataset(Protocol):
    """Samples by number, and what a model must know of them.

    Some have more: `draws`, how many random numbers `read(index, draws)` takes; `path(index)`, the file that messages
    about a sample name; `open(index)`, like `read` but with the image still `Encoded`; `image_sizes()`, the height and
    width of each image [N, 2]; `joints`, the names of keypoints; `notes`, what was found odd when the index was read.
    Several threads read at once.
    """

    classes: list[str]

    @property
    def channels(self) -> int:
        """How many channels images have."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """Sample `index`, unchanged."""
        ...


class SplitLoader:
    """A data set with its transforms. What is random about a sample depends on (seed, epoch, sample) alone; what all
    samples of a step share, such as their size, on (seed, step).

    With `skips`, samples that cannot be read are left out and listed there; without, the first one is a DataError.
    Floats that a data set gathers as whole tensors become `float_type`; float64 is for models in double precision.
    """

    def __init__(
        self,
        dataset: Dataset,
        transforms: Sequence[SampleTransform | BatchTransform],
        seed: int,
        skips: SkipList | None = None,
        float_type: torch.dtype = torch.float32,
    ) -> None:
        self.dataset = dataset
        self.float_type = float_type
        self.seed = seed
        self.skips = skips
        self.sample_transforms, self.batch_transforms = split(transforms, have_one_size=hasattr(dataset, "gather"))
        self._pipeline = TransformPipeline(dataset, self.sample_transforms, seed)
        self._is_per_step = [getattr(each, "per_step", False) for each in self.batch_transforms]
        of_samples = zip(self.batch_transforms, self._is_per_step, strict=True)
        self._num_draws = [0 if is_per_step else each.draws for each, is_per_step in of_samples]
        self._no_draws = None if any(self._num_draws) else [torch.empty(0, 0)] * len(self._num_draws)
        self.checks: Sequence[LabelCheck] = ()
        """Each looks at a batch on the host: the first sample that losses cannot be computed for, and why."""
        self.padding: Padding | None = None
        """How images of different sizes are stacked; None refuses them."""
        self.keeps_counts = all(getattr(each, "keeps_counts", False) for each in self.batch_transforms)
        """Whether losses are divided by as much after the transforms of whole batches as before them."""
        self.in_memory = hasattr(dataset, "gather") and not self.sample_transforms
        """Whether batches are indexed as tensors, with no Python per sample."""
        self.uses_global_rng = self._pipeline.uses_global_rng
        """Whether reading draws from generators that all threads of a process share."""

    def fetch(self, epoch: int, ids: Ids) -> Batch:
        """The samples `ids` as a batch on the host, before the transforms of whole batches."""
        try:
            batch = self._fetch(epoch, ids)
            self.check(batch)
        except Exception as error:
            if named := named_error(error, DataError):
                raise named from error
            raise
        return batch

    def check(self, batch: Batch) -> None:
        """Raise DataError, which names the file, if losses cannot be computed for a sample of a batch on the host."""
        for check in self.checks:
            if (wrong := check(batch)) is not None:
                raise locate_error(self.dataset, wrong[0], DataError(wrong[1]))

    def _fetch(self, epoch: int, ids: Ids) -> Batch:
        if self.in_memory and (self.padding is None or self.padding.size_divisible == 1):
            try:
                return self._gather(ids)
            except UNREADABLE:
                if self.skips is None:
                    raise  # else one by one, to find out which
        together, skipped = Collator(len(ids), self.padding), []
        for index, drawn in zip(ids.tolist(), self._pipeline.draw(epoch, ids), strict=True):
            sample = self._try_sample(epoch, index, drawn)
            if isinstance(sample, Skipped):
                skipped.append(sample)
                continue
            try:
                together.add(index, sample)
            except DataError as error:
                raise locate_error(self.dataset, index, error) from error
        batch = self._placeholder(epoch, ids) if skipped and not together else together.batch()
        if skipped:
            batch.skipped, batch.is_placeholder = skipped, not together
        return batch

    def _gather(self, ids: Ids) -> Batch:
        gather: Callable[[Tensor], dict[str, Any]] = self.dataset.gather  # type: ignore[attr-defined]
        numbers = torch.from_numpy(ids)
        fields = gather(numbers)
        try:
            return Batch(fields, id=numbers, image=as_images(fields["image"], self.float_type))
        except DataError as error:
            raise DataError(f"{type(self.dataset).__name__}: {error}") from error

    def transform_batch(self, batch: Batch, epoch: int, device: torch.device, step: int = 0) -> Batch:
        """The batch on the device, with the transforms of whole batches applied there; notes what it had to leave out.

        Raises DataError once more was left out than may be.
        """
        if batch.skipped and self.skips is not None:
            self.skips.add(batch.skipped)
        fields: dict[str, Any] = Batch(batch) if device.type == "cpu" else batch.to(device)
        drawn = self._draw(batch, epoch, device) if self._no_draws is None else self._no_draws
        if IMAGE_SIZE in batch:
            self._check_padded()
        for number, transform in enumerate(self.batch_transforms):
            draws = self._draw_for_step(step, number) if self._is_per_step[number] else drawn[number]
            fields = transform(fields, draws)
        ready = Batch(fields)
        if ready["image"].dtype == torch.uint8:  # nothing normalized it: models take numbers from 0 to 1
            ready["image"] = ready["image"].float().div_(255)
        if IMAGE_SIZE in ready:  # zeros behind normalization, whatever else a batch holds
            clear_padding(ready["image"], ready[IMAGE_SIZE].tolist())
        if batch.skipped:
            ready.skipped, ready.is_placeholder = batch.skipped, batch.is_placeholder
        return ready

    def _check_padded(self) -> None:
        """Raise DataError if a transform of whole batches would move images of different sizes, or mix them."""
        for transform in self.batch_transforms:
            if not getattr(transform, "keeps_padding", False):
                raise DataError(
                    f"{name_of(transform)} works on whole batches, and cannot where images differ in size; put it"
                    " before normalize if it can work on single images, or add a transform that gives one size, such"
                    " as {name: resize, size: [224, 224]}"
                )

    def _draw(self, batch: Batch, epoch: int, device: torch.device) -> Sequence[Tensor]:
        """The random numbers of each transform of whole batches, all drawn at once."""
        first = len(self.sample_transforms)
        drawn = uniforms_of_streams(self.seed, epoch, batch.ids.numpy(), first, self._num_draws)
        numbers = torch.from_numpy(as_float32(drawn) if device.type == "mps" else drawn)  # mps has no float64
        return numbers.to(device, non_blocking=True).split_with_sizes(self._num_draws, 1)

    def _draw_for_step(self, step: int, number: int) -> Tensor:
        """The random numbers of a transform that does the same to all that is computed in a step, [1, draws]."""
        stream = len(self.sample_transforms) + number
        # Steps count below zero where samples count from zero, so that no key is used twice.
        return torch.from_numpy(
            uniforms(self.seed, 0, np.array([-1 - step]), stream, self.batch_transforms[number].draws)
        )

    def _try_sample(self, epoch: int, index: int, draws: npt.NDArray[np.float64]) -> Sample | Skipped:
        try:
            return self._pipeline.sample(epoch, index, draws)
        except UNREADABLE as error:
            if self.skips is not None:
                return as_skipped(self.dataset, index, error)
            if isinstance(error, DamagedFileError):
                raise DamagedFileError(f"{error}; set data.on_error: skip to leave such samples out") from error
            raise

    def _placeholder(self, epoch: int, ids: Ids) -> Batch:
        """The next sample that can be read, as often as wanted, where none of a batch can.

        So a batch is never empty: a process can compute one that stands in for it, and keep step with the others.
        """
        last: Sample | Skipped | None = None
        limit = 0 if self.skips is None else self.skips.limit
        for further in range(1, limit + 2):
            index = (int(ids[-1]) + further) % len(self.dataset)
            last = self._try_sample(epoch, index, self._pipeline.draw(epoch, np.array([index]))[0])
            if not isinstance(last, Skipped):
                return collate(np.full(len(ids), index), [last] * len(ids), self.padding)
        if limit >= len(self.dataset):
            raise DataError(f"none of {pluralize(len(self.dataset), 'sample')} can be read; {last}")
        raise DataError(
            f"more than {pluralize(limit, 'sample')} in a row cannot be read, which is what data.max_skipped allows in"
            f" all; {last}"
        )


Draws = NDArray[np.float64]
_READING = 1 << 40  # the stream of a data set that draws while it reads


class TransformPipeline:
    """The transforms of single samples, applied to what a data set reads."""

    def __init__(self, dataset: Dataset, transforms: Sequence[SampleTransform], seed: int) -> None:
        self.dataset = dataset
        self.transforms = list(transforms)
        self.seed = seed
        self._num_draws = [transform.draws for transform in self.transforms]
        self._edges = np.cumsum([0, *self._num_draws]).tolist()
        self._encoded = [bool(getattr(transform, "reads_encoded", False)) for transform in self.transforms]
        self._draws_to_read = int(getattr(dataset, "draws", 0))
        drawing = any(getattr(transform, "uses_global_rng", False) for transform in self.transforms)
        self.uses_global_rng = drawing or self._draws_to_read > 0
        opened: Callable[[int], Sample] | None = getattr(dataset, "open", None)
        self._open = opened if opened and self._encoded[:1] == [True] else dataset.read

    def draw(self, epoch: int, ids: Ids) -> Draws:
        """The random numbers of all transforms for each of the samples, [N, sum of their draws]."""
        if not self._edges[-1]:
            return np.empty((len(ids), 0))
        return uniforms_of_streams(self.seed, epoch, ids, 0, self._num_draws)

    def sample(self, epoch: int, index: int, draws: Draws) -> Sample:
        """Sample `index` after the transforms, with its row of the drawn numbers."""
        opened = self._read(epoch, index)
        try:
            return as_arrays(self._transformed(as_arrays(opened), draws))
        except DataError as error:
            raise locate_error(self.dataset, index, error) from error

    def _read(self, epoch: int, index: int) -> Sample:
        if not self._draws_to_read:
            return self._open(index)
        draw_and_read: Callable[..., Sample] = self.dataset.read
        return draw_and_read(index, uniforms(self.seed, epoch, np.array([index]), _READING, self._draws_to_read)[0])

    def _transformed(self, sample: Sample, draws: Draws) -> Sample:
        for number, transform in enumerate(self.transforms):
            if not self._encoded[number]:
                sample = decode_image(sample)
            own = draws[self._edges[number] : self._edges[number + 1]]
            sample = transform(sample, own)
        return decode_image(sample)


def decode_image(sample: Sample) -> Sample:
    """The sample with the pixels of its image, if it is still encoded."""
    image: Any = sample["image"]
    return sample if isinstance(image, np.ndarray) else {**sample, "image": image.decode()}
