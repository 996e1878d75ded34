"""The random number generators that belong to the whole process: torch's, NumPy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_generators(key: int) -> None:
    """Restart all three."""
    torch.default_generator.manual_seed(key)
    np.random.seed(key & 0xFFFF_FFFF)
    random.seed(key)


def generator_states() -> tuple[Any, ...]:
    """Their states, to compare: whether something drew in between."""
    of_numpy: Any = np.random.get_state()
    kind, words, *rest = of_numpy
    return random.getstate(), kind, words.tobytes(), *rest, torch.default_generator.get_state().numpy().tobytes()


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """A context for what seeds them: afterwards, the caller's own numbers go on."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
