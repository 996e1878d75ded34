"""Steps of any size and number of processes, from a few that are rehearsed: their memory grows evenly with samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from paceline.engine.run import Run
from paceline.plan.cost import CostCounter, StepCost
from paceline.plan.memory import CATEGORIES, Category, Memory, Timeline
from paceline.plan.rehearse import Rehearsal

MOST_SAMPLES = 2**20
"""The largest micro-batch that is looked for: beyond, nobody asks."""
_MOST_REHEARSED = 8
"""The most processes that are rehearsed: what more of them change is arithmetic."""
_FEWEST = 2  # samples of the steps between which memory grows evenly
_MANY = 32  # samples from which the peak grows evenly, in models that go through the images of a batch one by one
_IN_PARTS: tuple[Category, ...] = ("parameters", "gradients", "optimizer")


class Taken(NamedTuple):
    """What a step took."""

    memory: Memory
    timeline: Timeline
    cost: StepCost


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
        [peak] = _peak_of(timeline)
        return Memory({part: int(number) for part, number in zip(CATEGORIES, peak, strict=True)})


class Steps:
    """The steps of a phase of a rehearsal, each taken once."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.run = rehearsal.run
        self._rehearsal = rehearsal
        self._taken: dict[tuple[int, int], Taken] = {}
        self._growth: dict[int, Growth] = {}

    def take(self, size: int, number: int) -> Taken:
        """What a step of micro-batches of this size took; more than two need as much memory as two."""
        key = size, min(2, number)
        if key not in self._taken:
            with CostCounter().count(self.run.optimizer) as cost:
                memory = self._rehearsal.step(*key)
            self._taken[key] = Taken(memory, self._rehearsal.timeline, cost)
        return self._taken[key]

    def largest(self, number: int, processes: int, limit: int) -> int:
        """The most samples of a micro-batch that fit."""

        def total(size: int) -> int:
            return divide(self._grown(size, number), self.run, processes).total

        return largest_micro_batch(total, _FEWEST, limit, min(MOST_SAMPLES, len(self.run.train_loader.dataset)))

    def _grown(self, size: int, number: int) -> Memory:
        """What a step needs by the growth between two others; few samples are taken, since they may be special."""
        growth = self._grow(min(2, number)) if size >= _FEWEST else None
        return growth.memory(size) if growth and size >= growth.first_size else self.take(size, number).memory

    def _grow(self, number: int) -> Growth:
        """How steps of so many micro-batches grow, at each moment; or at their peak, if moments depend on the size."""
        if number not in self._growth:
            sizes = {_FEWEST, *(size for size, passes in self._taken if passes == number and size > _FEWEST)}
            pair = sorted(sizes if len(sizes) > 1 else (_FEWEST, 2 * _FEWEST))[:2]
            one, other = (self.take(size, number).timeline for size in pair)
            if one.shape != other.shape:
                pair = [_MANY, 2 * _MANY]
                one, other = (_peak_of(self.take(size, number).timeline) for size in pair)
            self._growth[number] = Growth(pair[0], one, pair[1], other)
        return self._growth[number]


def _peak_of(timeline: Timeline) -> Timeline:
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


def rehearsed_processes(strategy: str, reproducible: str, processes: int) -> int:
    """The fewest processes whose rehearsal gives the memory of so many; with ddp, each holds everything."""
    is_replicated = strategy in ("auto", "ddp", "single", "dp") and reproducible != "world"
    return min(processes, 2 if is_replicated else _MOST_REHEARSED)


def divide(memory: Memory, run: Run, processes: int) -> Memory:
    """What rank 0 of so many processes holds, from what it holds in a run that was rehearsed with fewer."""
    if processes == run.world.size or run.strategy.passes != "equal":
        return memory
    now, then = (_largest_part(run, number) for number in (run.world.size, processes))
    shares = {part: round(memory.parts[part] * then / now) for part in _IN_PARTS}
    return Memory({**memory.parts, **shares})


def _largest_part(run: Run, processes: int) -> int:
    """The elements of parameters that the first of so many processes keeps: rows are divided, rounded up."""
    shapes = (parameter.shape for parameter in run.model.parameters())
    return sum(-(-shape[0] // processes) * shape[1:].numel() if shape else 1 for shape in shapes)
