"""The generators that all of a process shares, seeded for a user's code that draws from them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import numpy as np
import torch

_SEEDS = 2**53  # a draw has as many values
_locks = [RLock()]


def _renew() -> None:
    """A process that is forked while another thread holds the lock would wait for ever."""
    _locks[0] = RLock()


os.register_at_fork(after_in_child=_renew)


@contextmanager
def seeded_generators(draw: float) -> Iterator[None]:
    """Surrounds code that draws from the generators of torch, NumPy or Python: what it draws follows from `draw` alone.

    One thread at a time: these generators belong to the whole process. A training step seeds torch's itself.
    """
    seed = int(draw * _SEEDS)
    with _locks[0]:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield
