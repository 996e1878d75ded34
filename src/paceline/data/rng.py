"""Keyed randomness: every random number is computed from what it is for, and none depends on an earlier one.

A key is a row of whole numbers, such as (seed, epoch, transform, sample, draw). It is folded into 64 bits by
the arithmetic below, which is part of what makes runs repeatable: changing it changes every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.generators import seed_generators

Words = NDArray[np.uint64]

_MASK = 0xFFFF_FFFF_FFFF_FFFF
# 2^64 / golden ratio, odd, and the two multipliers of splitmix64.
_STRIDE, _FIRST, _SECOND = 0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB
_STRIDE_WORD, _FIRST_WORD, _SECOND_WORD = np.uint64(_STRIDE), np.uint64(_FIRST), np.uint64(_SECOND)
_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
_11, _27, _30, _31 = (np.uint64(shift) for shift in (11, 27, 30, 31))


def uniforms(seed: int, epoch: int, ids: NDArray[np.int64], stream: int, draws: int) -> NDArray[np.float64]:
    """Numbers in [0, 1), [N, draws]: row i is a pure function of the seed, the epoch, ids[i] and the stream.

    `stream` keeps apart what draws for the same sample in the same epoch: the transforms of a recipe.
    """
    return uniforms_of_streams(seed, epoch, ids, stream, [draws])


def uniforms_of_streams(
    seed: int, epoch: int, ids: NDArray[np.int64], first: int, draws: Sequence[int]
) -> NDArray[np.float64]:
    """The `uniforms` of several streams, counted from `first`, side by side: [N, sum of draws]."""
    streams = [_fold_numbers(seed, epoch, stream) for stream in range(first, first + len(draws))]
    of_columns = np.repeat(np.array(streams, np.uint64), draws)
    numbers_in_stream = np.concatenate([np.arange(count) for count in draws])
    words = _fold(_fold(of_columns, ids[:, None]), numbers_in_stream)
    numbers: NDArray[np.float64] = (words >> _11).astype(np.float64)
    numbers *= 2.0**-53
    return numbers


def as_float32(numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    """Numbers in [0, 1) as float32, still below 1, for devices without float64."""
    return np.minimum(numbers.astype(np.float32), _BELOW_ONE)


def derive(seed: int, *parts: int) -> int:
    """One number in [0, 2^63) from a seed and what it is wanted for, to seed a generator with."""
    return _fold_numbers(seed, *parts) >> 1


_MODEL_STREAM = 0x4D4F  # keeps the seed of the initial weights apart from those of the steps


def model_seed(seed: int) -> int:
    """The seed of a model's initial weights: `world.seed(model_seed(0))`."""
    return derive(seed, _MODEL_STREAM)


def _fold_numbers(*parts: int) -> int:
    word = 0
    for part in parts:
        word = (word + (int(part) + 1) * _STRIDE) & _MASK
        word = (word ^ (word >> 30)) * _FIRST & _MASK
        word = (word ^ (word >> 27)) * _SECOND & _MASK
        word ^= word >> 31
    return word


def _fold(words: Words | np.uint64, part: NDArray[np.integer[Any]]) -> Words:
    """One more step of `_fold_numbers`, for arrays: these wrap around silently, which is what is wanted."""
    steps: Words = part.astype(np.uint64)
    steps += np.uint64(1)
    steps *= _STRIDE_WORD
    folded: Words = steps + words
    folded ^= folded >> _30
    folded *= _FIRST_WORD
    folded ^= folded >> _27
    folded *= _SECOND_WORD
    folded ^= folded >> _31
    return folded


_SEEDS = 2**53  # a draw has as many values
_locks = [RLock()]


def _renew() -> None:
    """A process that is forked while another thread holds the lock would wait for ever."""
    _locks[0] = RLock()


os.register_at_fork(after_in_child=_renew)


@contextmanager
def seeded_generators(draw: float) -> Iterator[None]:
    """Surrounds code that draws from the generators of torch, NumPy or Python: what it draws follows from `draw` alone.

    One thread at a time: these generators belong to the whole process. A training step seeds them itself.
    """
    with _locks[0]:
        seed_generators(int(draw * _SEEDS))
        yield
