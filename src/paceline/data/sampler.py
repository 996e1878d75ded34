"""Which sample comes when: a keyed permutation that needs no memory, and the cutting of steps into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isqrt

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ArgumentError, UsageError
from paceline.core.text import pluralize
from paceline.data.rng import derive

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_WORLD_PARTS, _WORLD_MIN = 8, 16  # micro-batches of a step that is divided alike for any world, and their minimum size
_BLOCK = 8192  # positions permuted at a time; the only memory the order needs
_FIRST, _SECOND, _HALF = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(0xD6E8_FEB8_6659_FD93), np.uint64(32)


class Permutation:
    """The order of `size` samples in every epoch, a pure function of (seed, epoch, position).

    Positions are written as (row, column) of the most nearly square rectangle that holds `size`; rounds of a Feistel
    network then shift rows by a hash of the column and columns by a hash of the row. The few positions that land
    behind the last sample walk on through the network until they land inside. Nothing is stored but one block of
    results.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self._rows = isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
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
        return values.view(np.int64)

    def _cached(self, epoch: int, block: int) -> Indices:
        if self._block_key != (epoch, block):
            stop = min(self.size, (block + 1) * _BLOCK)
            self._block = self.permute(epoch, np.arange(block * _BLOCK, stop))
            self._block_key = (epoch, block)
        return self._block

    def _network(self, values: Words, keys: list[np.uint64]) -> Words:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        changing = values // columns
        steady = values - changing * columns
        hashed, scratch = np.empty_like(values), np.empty_like(values)
        for number, key in enumerate(keys):
            _hash(steady, key, hashed, scratch)
            hashed += changing
            _remainder(hashed, columns if number % 2 else rows, changing)
            changing, steady = steady, changing
        return changing * columns + steady  # after an even number of rounds each is what it was


def _hash(values: Words, key: np.uint64, out: Words, scratch: Words) -> None:
    """A keyed hash to 32 bits: two multiplications, the first of them folded. Arrays wrap around silently."""
    np.add(values, key, out=out)
    out *= _FIRST
    np.right_shift(out, _HALF, out=scratch)
    out ^= scratch
    out *= _SECOND
    out >>= _HALF


def _remainder(values: Words, divisor: np.uint64, out: Words) -> None:
    """values % divisor, several times faster than numpy's own."""
    np.floor_divide(values, divisor, out=out)
    out *= divisor
    np.subtract(values, out, out=out)


@dataclass(slots=True)
class BatchSlice:
    """Micro-batch `index` of a step: positions [start, stop) of its epoch."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class BatchSampler:
    """How the samples of a run are cut into steps and micro-batches (the batch contract).

    Every sample comes once an epoch: the last step of an epoch is smaller unless `drop_last`. The micro-batches of an
    update differ in size by at most one, so that none is too small for BatchNorm. Their number is a multiple of
    `multiple`, for what needs as many on every process.
    """

    size: int
    batch: int
    micro_batch_size: int
    drop_last: bool = False
    multiple: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Updates in an epoch."""
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    def epoch(self, step: int) -> int:
        """The epoch that update `step` belongs to, both counted from 0."""
        return step // self.steps_per_epoch

    def slices(self, step: int) -> list[BatchSlice]:
        """All micro-batches of update `step`."""
        start = step % self.steps_per_epoch * self.batch
        samples = min(self.batch, self.size - start)
        number = -(-samples // self.micro_batch_size)
        number += -number % self.multiple
        if number == 1:
            return [BatchSlice(0, start, start + samples)]
        edges = [start + samples * k // number for k in range(number + 1)]
        return [BatchSlice(k, edges[k], edges[k + 1]) for k in range(number)]


def automatic_micro_batch_size(samples: int, num_processes: int, is_same_for_any: bool = False) -> int:
    """The size that divides a step of `samples` by processes; with `is_same_for_any`, by 8 whatever their number."""
    if samples < 1:
        raise ArgumentError("samples", f"expected a step of at least 1 sample, got {samples}; increase the batch size")
    if is_same_for_any:
        return max(ceil(samples / _WORLD_PARTS), min(samples, _WORLD_MIN))
    share = ceil(samples / num_processes)
    return share if ceil(samples / share) >= num_processes else max(1, samples // num_processes)


def check_processes(sampler: BatchSampler, num_processes: int) -> None:
    """Raise UsageError if there are more processes than micro-batches in a step."""
    number, samples = len(sampler.slices(0)), min(sampler.batch, sampler.size)
    if number < num_processes or samples < num_processes:
        most = min(number, samples)
        raise UsageError(
            f"{num_processes} processes are too many: a step of {pluralize(samples, 'sample')} is divided into"
            f" {pluralize(most, 'micro-batch')} of at most {sampler.micro_batch_size}, and each process needs one;"
            f" use at most --procs {most}, or change data.batch_size ({sampler.batch}) or train.micro_batch_size"
        )


def rank_slices(items: list[BatchSlice], rank: int, world: int) -> list[BatchSlice]:
    """The contiguous share of `items` that belongs to `rank`."""
    start, stop = rank_range(len(items), rank, world)
    return items[start:stop]


def rank_range(number: int, rank: int, world: int) -> tuple[int, int]:
    """Which of `number` things belong to `rank`, from and to; shares differ by at most one, the first are larger."""
    each, more = divmod(number, world)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def evaluation_slices(size: int, batch: int) -> list[BatchSlice]:
    """The evaluation contract: batch k is positions [k·batch, (k+1)·batch), whatever the number of processes."""
    return [BatchSlice(k, start, min(start + batch, size)) for k, start in enumerate(range(0, size, batch))]
