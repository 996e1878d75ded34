"""Batches of images of similar shape: samples grouped by aspect ratio, in an order that follows from seed and epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.data.rng import derive
from paceline.data.sampler import Indices, Permutation

_MEMBERS, _BATCHES = 0x4752, 0x4241  # keep the orders of members and of batches apart from each other and from others
_BLOCK = 1024  # samples among which a member is looked for

Groups = NDArray[np.uint8]
"""The group of each sample, all that the order keeps of it."""


def group_by_aspect_ratio(sizes: NDArray[np.int64], factor: int) -> Groups:
    """The group of each image, given its height and width [N, 2]: by width / height, as torchvision's references group.

    With a factor of 0 there are two groups, below and from 1; else 2 * factor + 2, whose bounds go evenly in the
    logarithm from 1/2 to 2.
    """
    bounds = 2.0 ** np.linspace(-1, 1, 2 * factor + 1) if factor else np.ones(1)
    return np.searchsorted(bounds, sizes[:, 1] / sizes[:, 0], side="right").astype(np.uint8)


class GroupedPermutation:
    """An order like `Permutation` in which every global batch is of one group, but for those that hold remainders.

    A keyed permutation orders the members of each group, which are cut into full batches. What remains of the groups,
    one after the other, is cut likewise. Another permutation orders all full batches; a smaller one is the last. So
    what a batch holds is a function of (seed, epoch), whatever divides it. Only the groups are kept, a byte a sample.
    """

    def __init__(self, groups: Groups, batch: int, seed: int) -> None:
        self.size, self.seed = len(groups), seed
        self._groups, self._batch = groups, batch
        num_groups, starts = int(groups.max()) + 1, range(0, self.size, _BLOCK)
        of_blocks = np.stack([np.bincount(groups[start : start + _BLOCK], minlength=num_groups) for start in starts])
        counts = of_blocks.sum(0)
        self._before = [_sums(of_block) for of_block in of_blocks.T]  # members of each group before each block
        self._members = [Permutation(max(1, count), derive(seed, _MEMBERS, k)) for k, count in enumerate(counts)]
        self._full, self._rest = _sums(counts // batch), _sums(counts % batch)  # batches and samples before each group
        self._num_full = self.size // batch
        self._batches = Permutation(max(1, self._num_full), derive(seed, _BATCHES))
        self._last: tuple[tuple[int, int], Indices] = (-1, -1), np.empty(0, np.int64)

    def at(self, epoch: int, start: int, stop: int) -> Indices:
        """The samples at positions [start, stop) of an epoch."""
        parts = [np.empty(0, np.int64)]
        for number in range(start // self._batch, -(-stop // self._batch)):
            first = number * self._batch
            parts.append(self._samples(epoch, number)[max(0, start - first) : stop - first])
        return np.concatenate(parts)

    def _samples(self, epoch: int, number: int) -> Indices:
        """The samples of a global batch."""
        key, samples = self._last
        if key != (epoch, number):
            full = number < self._num_full
            chosen = int(self._batches.permute(epoch, np.array([number]))[0]) if full else number
            samples = self._full_batch(epoch, chosen) if chosen < self._full[-1] else self._mixed_batch(epoch, chosen)
            self._last = (epoch, number), samples
        return samples

    def _full_batch(self, epoch: int, chosen: int) -> Indices:
        group = int(np.searchsorted(self._full, chosen, side="right")) - 1
        start = int(chosen - self._full[group]) * self._batch
        return self._select(epoch, group, start, start + self._batch)

    def _mixed_batch(self, epoch: int, chosen: int) -> Indices:
        """A batch of what remains of the groups behind their full batches."""
        start = int(chosen - self._full[-1]) * self._batch
        bounds, parts = np.clip(self._rest, start, start + self._batch), []
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            behind = int(self._full[group + 1] - self._full[group]) * self._batch - int(self._rest[group])
            parts.append(self._select(epoch, group, behind + int(bounds[group]), behind + int(bounds[group + 1])))
        return np.concatenate(parts)

    def _select(self, epoch: int, group: int, start: int, stop: int) -> Indices:
        """The samples at positions [start, stop) of a group."""
        ranks = self._members[group].permute(epoch, np.arange(start, stop))
        blocks = np.searchsorted(self._before[group], ranks, side="right") - 1
        samples, ranks = blocks * _BLOCK, ranks - self._before[group][blocks]
        for place, first in enumerate(samples.tolist()):
            samples[place] += np.flatnonzero(self._groups[first : first + _BLOCK] == group)[ranks[place]]
        return samples


def _sums(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many come before each, and at last how many there are."""
    return np.concatenate([[0], np.cumsum(counts)])
