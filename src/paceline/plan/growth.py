"""How memory grows with the samples of a micro-batch: by a line at each moment of a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.plan.memory import CATEGORIES, Memory, Timeline

MOST_SAMPLES = 2**20
"""The largest micro-batch that is looked for: beyond, nobody asks."""


class Growth:
    """The memory of steps of any size, from two that were taken: the shapes of a step grow evenly with its samples.

    The peak itself grows by no line: another moment of the step may become the largest.
    """

    def __init__(self, size: int, timeline: Timeline, other_size: int, other: Timeline) -> None:
        self.first_size = size
        """The fewest samples that it is known for."""
        self._slope = (other - timeline) / (other_size - size)
        self._start = timeline - size * self._slope

    def memory(self, size: int) -> Memory:
        """What a step of micro-batches of this size takes at most."""
        timeline = np.rint(self._start + size * self._slope).astype(np.int64)
        [peak] = peak_of(timeline)
        return Memory({part: int(number) for part, number in zip(CATEGORIES, peak, strict=True)})


def peak_of(timeline: Timeline) -> Timeline:
    """The one moment of a step when most is alive."""
    return timeline[[timeline.sum(axis=1).argmax()]]


def largest_micro_batch(total: Callable[[int], int], start: int, limit: int, most: int = MOST_SAMPLES) -> int:
    """The most samples, up to `most`, of a micro-batch whose step takes at most `limit` bytes; 0 if one takes more.

    `total` gives the bytes that a step of so many samples takes. Sizes are doubled from `start`, then halved between.
    """
    fitting, failing, size = 0, most + 1, min(start, most)
    while failing - fitting > 1:
        if total(size) <= limit:
            fitting = size
        else:
            failing = size
        size = min(2 * size, most) if failing > most else (fitting + failing) // 2
    return fitting
