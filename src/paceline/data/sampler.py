"""Which sample comes when: a keyed permutation that needs no memory, and the cutting of updates into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.data.keys import derive

Indices = npt.NDArray[np.int64]
_ROUNDS = 8
_BLOCK = 8192  # positions permuted at a time; the only memory the order needs


class Order:
    """The order of `size` samples in every epoch, a pure function of (seed, epoch, position).

    A Feistel network permutes the smallest even-bit range that holds `size`; positions that land outside
    walk on through the network until they land inside. Nothing is stored but one block of results.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._block_key = (-1, -1)
        self._block = np.empty(0, np.int64)

    def at(self, epoch: int, start: int, stop: int) -> Indices:
        """The samples at positions [start, stop) of an epoch."""
        first, last = start // _BLOCK, max(start, stop - 1) // _BLOCK
        if first == last:
            return self._cached(epoch, first)[start - first * _BLOCK : stop - first * _BLOCK]
        return self.permute(epoch, np.arange(start, stop))

    def permute(self, epoch: int, positions: Indices) -> Indices:
        """The samples at any positions of an epoch."""
        keys = [np.uint64(derive(self.seed, epoch, i) >> 1) for i in range(_ROUNDS)]
        values = self._network(positions.astype(np.uint64), keys)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._network(values[outside], keys)
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _cached(self, epoch: int, block: int) -> Indices:
        if self._block_key != (epoch, block):
            stop = min(self.size, (block + 1) * _BLOCK)
            self._block = self.permute(epoch, np.arange(block * _BLOCK, stop))
            self._block_key = (epoch, block)
        return self._block

    def _network(self, values: npt.NDArray[np.uint64], keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in keys:
            left, right = right, left ^ (_scramble(right, key) & mask)
        return (left << bits) | right


def _scramble(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """A keyed hash: two multiply-and-fold turns after the key is added."""
    with np.errstate(over="ignore"):
        values = (values + key) * np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


@dataclass(frozen=True)
class Cut:
    """Micro-batch `index` of an update: positions [start, stop) of its epoch."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Updates:
    """How the samples of a run are cut into updates and micro-batches (the batch contract).

    Every sample comes once an epoch: the last update of an epoch is smaller unless `drop_last`. The micro-batches of an
    update differ in size by at most one, so that none is too small for BatchNorm.
    """

    size: int
    batch: int
    micro_batch: int
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Updates in an epoch."""
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    def epoch(self, step: int) -> int:
        """The epoch that update `step` belongs to, both counted from 0."""
        return step // self.steps_per_epoch

    def cuts(self, step: int) -> list[Cut]:
        """All micro-batches of update `step`."""
        start = step % self.steps_per_epoch * self.batch
        samples = min(self.batch, self.size - start)
        number = -(-samples // self.micro_batch)
        edges = [start + samples * k // number for k in range(number + 1)]
        return [Cut(k, edges[k], edges[k + 1]) for k in range(number)]

    def owned(self, step: int, rank: int, world: int) -> list[Cut]:
        """The contiguous range of micro-batches that one rank computes; it may be empty."""
        return owned(self.cuts(step), rank, world)


def owned(items: list[Cut], rank: int, world: int) -> list[Cut]:
    """The contiguous share of `items` that belongs to `rank`; shares differ by at most one."""
    return items[len(items) * rank // world : len(items) * (rank + 1) // world]


def evaluation_cuts(size: int, batch: int) -> list[Cut]:
    """The evaluation contract: batch k is positions [k·batch, (k+1)·batch), whatever the number of processes."""
    return [Cut(k, start, min(start + batch, size)) for k, start in enumerate(range(0, size, batch))]
