"""The steps of a phase of a rehearsal: taken once each, or known by how memory grows between two of them."""

from __future__ import annotations

from functools import cached_property

from paceline.plan.cost import CostCounter, StepCost
from paceline.plan.growth import MOST_SAMPLES, Growth, largest_micro_batch, peak_of
from paceline.plan.memory import Memory, Timeline
from paceline.plan.rehearse import Rehearsal
from paceline.plan.shards import divide

_FEWEST = 2  # samples of the steps between which memory grows evenly
_MANY = 32  # samples from which the peak grows evenly, in models that go through the images of a batch one by one


class Steps:
    """The steps of a rehearsal, each taken once; those of other sizes follow from how memory grows between them."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        self._taken: dict[tuple[int, int], Memory] = {}
        self._timelines: dict[tuple[int, int], Timeline] = {}
        self._costs: dict[tuple[int, int], StepCost] = {}
        self._growth: dict[int, Growth] = {}

    @cached_property
    def num_samples(self) -> int:
        """The samples of the training data."""
        return len(self.rehearsal.run.train_loader.dataset)

    def take(self, size: int, number: int) -> Memory:
        """What a step of micro-batches of this size needs; more than two need as much as two."""
        key = size, min(2, number)
        if key not in self._taken:
            self._taken[key] = self.rehearsal.step(*key)
            self._timelines[key] = self.rehearsal.timeline
        return self._taken[key]

    def take_counted(self, size: int, number: int) -> tuple[Memory, StepCost]:
        """What a step needs, and what its operators compute and move."""
        key = size, min(2, number)
        if key not in self._costs:
            self._taken.pop(key, None)
            with CostCounter().count(self.rehearsal.run.optimizer) as cost:
                self.take(*key)
            self._costs[key] = cost
        return self._taken[key], self._costs[key].repeated(number / key[1])

    def grown(self, size: int, number: int) -> Memory:
        """What a step needs by the growth between two others; few samples are taken, since they may be special."""
        growth = self._grow(min(2, number)) if size >= _FEWEST else None
        return growth.memory(size) if growth and size >= growth.first_size else self.take(size, number)

    def largest(self, number: int, processes: int, limit: int) -> int:
        """The most samples of a micro-batch that fit."""

        def total(size: int) -> int:
            return divide(self.grown(size, number), self.rehearsal.run, processes).total

        return largest_micro_batch(total, _FEWEST, limit, min(MOST_SAMPLES, self.num_samples))

    def _grow(self, number: int) -> Growth:
        """How steps of so many micro-batches grow, at each moment; or at their peak, if moments depend on the size."""
        if number not in self._growth:
            sizes = {_FEWEST, *(size for size, passes in self._taken if passes == number and size > _FEWEST)}
            pair = sorted(sizes if len(sizes) > 1 else (_FEWEST, 2 * _FEWEST))[:2]
            one, other = (self._timeline(size, number) for size in pair)
            if one.shape != other.shape:
                pair = [_MANY, 2 * _MANY]
                one, other = (peak_of(self._timeline(size, number)) for size in pair)
            self._growth[number] = Growth(pair[0], one, pair[1], other)
        return self._growth[number]

    def _timeline(self, size: int, number: int) -> Timeline:
        self.take(size, number)
        return self._timelines[size, number]
