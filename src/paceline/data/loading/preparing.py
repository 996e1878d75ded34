"""One sample as its transforms leave it: read, decoded no further than they need, and changed by keyed draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.batch import Sample
from paceline.data.keys import uniforms, uniforms_of_streams
from paceline.data.skipping import UNREADABLE, placed
from paceline.data.transforms.kinds import SampleTransform

Ids = NDArray[np.int64]
Draws = NDArray[np.float64]
_OTHERS = 1 << 32  # streams from here on choose the further samples of a transform


class Readable(Protocol):
    """What samples are read from, by number; with `open` perhaps, which leaves the image encoded."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """Sample `index`, unchanged."""
        ...


class Preparation:
    """The transforms of single samples, applied to what a data set reads.

    A further sample that a transform mixes in goes through the transforms before it, as it would on its own. If one
    cannot be read, the next one that can takes its place, after at most `limit` that cannot; without a limit, that is
    an error.
    """

    def __init__(
        self, dataset: Readable, transforms: Sequence[SampleTransform], seed: int, limit: int | None = None
    ) -> None:
        self.dataset = dataset
        self.transforms = list(transforms)
        self.seed = seed
        self.limit = limit
        self._wanted = [transform.draws for transform in self.transforms]
        self._edges = np.cumsum([0, *self._wanted]).tolist()
        self._encoded = [bool(getattr(transform, "reads_encoded", False)) for transform in self.transforms]
        self._others = [int(getattr(transform, "others", 0)) for transform in self.transforms]
        opened: Callable[[int], Sample] | None = getattr(dataset, "open", None)
        self._open = opened if opened and self._encoded[:1] == [True] else dataset.read

    def draw(self, epoch: int, ids: Ids) -> Draws:
        """The random numbers of all transforms for each of the samples, [N, sum of their draws]."""
        if not self._edges[-1]:
            return np.empty((len(ids), 0))
        return uniforms_of_streams(self.seed, epoch, ids, 0, self._wanted)

    def sample(self, epoch: int, index: int, draws: Draws, stop: int | None = None) -> Sample:
        """Sample `index` after the transforms, or the first `stop` of them, with its row of the drawn numbers."""
        opened = self._open(index)
        try:
            return self._transformed(epoch, index, opened, draws, stop)
        except DataError as error:
            raise placed(self.dataset, index, error) from error

    def _transformed(self, epoch: int, index: int, sample: Sample, draws: Draws, stop: int | None) -> Sample:
        for number, transform in enumerate(self.transforms[:stop]):
            if not self._encoded[number]:
                sample = decoded(sample)
            own = draws[self._edges[number] : self._edges[number + 1]]
            if self._others[number]:
                mix: Callable[..., Sample] = transform
                sample = mix(sample, own, list(self._further(epoch, index, number)))
            else:
                sample = transform(sample, own)
        return decoded(sample)

    def _further(self, epoch: int, index: int, number: int) -> Iterator[Sample]:
        """The samples that transform `number` mixes into sample `index`."""
        drawn = uniforms(self.seed, epoch, np.array([index]), _OTHERS + number, self._others[number])[0]
        for chosen in (drawn * len(self.dataset)).astype(np.int64).tolist():
            yield self._readable(epoch, chosen, number)

    def _readable(self, epoch: int, index: int, stop: int) -> Sample:
        size = len(self.dataset)
        patience = min(self.limit or 0, size - 1)
        for further in range(patience):
            with suppress(*UNREADABLE):
                return self._on_its_own(epoch, (index + further) % size, stop)
        return self._on_its_own(epoch, (index + patience) % size, stop)

    def _on_its_own(self, epoch: int, index: int, stop: int) -> Sample:
        return self.sample(epoch, index, self.draw(epoch, np.array([index]))[0], stop)


def decoded(sample: Sample) -> Sample:
    """The sample with the pixels of its image, if it is still encoded."""
    image: Any = sample["image"]
    return sample if isinstance(image, np.ndarray) else {**sample, "image": image.decode()}
