"""Rows of a plan: what a recipe needs with other settings, rehearsed side by side on the cores of this machine."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.core.errors import PacelineError
from paceline.core.intervals import to_steps
from paceline.core.process import num_cores
from paceline.core.world import World
from paceline.data.sampler import BatchSampler
from paceline.plan.cost import CostCounter, StepCost
from paceline.plan.memory import Memory
from paceline.plan.rehearse import Rehearsal, rehearse
from paceline.plan.shards import divide, rehearsed_processes
from paceline.plan.surrogate import Shape
from paceline.recipe.build_context import BuildContext
from paceline.recipe.build_data import make_sampler
from paceline.recipe.load import load
from paceline.recipe.validate import CheckedRecipe, validate

Settings = Mapping[str, str]
"""The recipe keys in which rows differ, and "procs"."""

_LEVER = 8  # times the first micro-batch is the second that is tried: a line through far points leads further
_MOST = 2**20  # samples of a micro-batch: beyond, nobody asks
_DIVIDE_ALONE = frozenset({"procs", "train.micro_batch_size", "data.batch_size"})  # a step, but not what it computes


@dataclass(frozen=True)
class Row:
    """What one combination of settings needs on each device."""

    settings: Settings
    micro_batch_size: int
    num_micro_batches: int
    """How many micro-batches a process computes in a step."""
    memory: Memory
    cost: StepCost
    precision: str
    num_steps: int | None
    """Steps of the run; None if they depend on data that is not here."""
    largest_micro_batch: int | None = None
    """The most samples of a micro-batch that fit; None without a limit, 0 if not even one fits."""
    missing: str = ""
    """Why samples were assumed rather than read; empty if they were read."""

    def fits(self, limit: int) -> bool:
        """Whether the row needs no more than `limit` bytes."""
        return self.memory.total <= limit

    @property
    def overrides(self) -> list[str]:
        """The settings as they are written on a command line."""
        return [f"{key}={value}" for key, value in self.settings.items() if key != "procs"]

    @property
    def processes(self) -> int:
        """The number of processes."""
        return int(self.settings["procs"])


@dataclass(frozen=True)
class Refused:
    """A combination that the recipe cannot have, and why."""

    settings: Settings
    reason: str


@dataclass(frozen=True)
class Grid:
    """What all rows have in common."""

    reference: str
    fixed: Sequence[str] = ()
    limit: int | None = None
    """Bytes of a device; if given, each row has the largest micro-batch within it."""
    shape: Shape = field(default_factory=Shape)

    def check(self, settings: Settings) -> CheckedRecipe:
        """The recipe of a row; where the row's own values are at fault, the message has their place."""
        chosen = [f"{key}={value}" for key, value in settings.items() if key != "procs"]
        # One thread: the rows share the cores, and a forked process must not use the threads of its parent.
        quiet = ["model.weights=null", "train.compile=false", "train.threads=1"]
        return validate(load(self.reference, [*self.fixed, *chosen, *quiet]))


def split_choices(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Overrides with one value, and those with several, as in `train.precision=fp32,bf16`."""
    fixed, choices = [], {}
    for override in overrides:
        key, _, value = override.partition("=")
        if "," in value and not value.startswith(("[", "{", '"', "'")):
            choices[key] = value.split(",")
        else:
            fixed.append(override)
    return fixed, choices


def combinations(choices: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Every combination of the choices, the last key changing fastest."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def plan_rows(
    grid: Grid, settings: Sequence[Settings], advance: Callable[[int], object] = lambda number: None
) -> list[Row | Refused]:
    """The rows of these settings, in their order; `advance` gets how many are done each time some are."""
    found: dict[int, Row | Refused] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, each in enumerate(settings):
        try:
            train = grid.check(each).recipe.train
        except PacelineError as error:
            found[index] = Refused(each, str(error))
            continue
        processes = rehearsed_processes(train.strategy.name, train.reproducible, int(each["procs"]))
        shared = tuple(item for item in each.items() if item[0] not in _DIVIDE_ALONE)
        groups.setdefault((processes, *shared), []).append(index)
    work = [(int(str(key[0])), indices) for key, indices in groups.items()]

    def collect(indices: list[int], rows: Sequence[Row | Refused]) -> None:
        found.update(zip(indices, rows, strict=True))
        advance(len(indices))

    workers = min(num_cores(), len(work))
    if workers < 2:
        for processes, indices in work:
            collect(indices, _plan_group(grid, processes, [settings[index] for index in indices]))
    else:
        FakeTensorMode()  # loads what each process would load again
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
            futures: list[tuple[list[int], Future[list[Row | Refused]]]] = [
                (indices, pool.submit(_plan_group, grid, processes, [settings[index] for index in indices]))
                for processes, indices in work
            ]
            for indices, future in futures:
                collect(indices, future.result())
    return [found[index] for index in range(len(settings))]


def _plan_group(grid: Grid, processes: int, group: Sequence[Settings]) -> list[Row | Refused]:
    """Rows that one rehearsal serves, since they only divide a step in other ways."""
    try:
        with rehearse(grid.check(group[0]), processes, grid.shape) as rehearsal:
            steps = _Steps(rehearsal)
            return [_plan_row(grid, steps, settings) for settings in group]
    except PacelineError as error:
        return [Refused(settings, str(error)) for settings in group]


def _plan_row(grid: Grid, steps: _Steps, settings: Settings) -> Row | Refused:
    processes = int(settings["procs"])
    try:
        checked = grid.check(settings)
        sampler = _sampler(checked, processes, steps.num_samples)
    except PacelineError as error:
        return Refused(settings, str(error))
    train, missing = checked.recipe.train, steps.rehearsal.missing
    size = min(sampler.micro_batch_size, -(-sampler.batch // processes))
    number = -(-sampler.batch // (size * processes))
    memory, cost = steps.take_counted(size, number)
    known = train.steps is not None or not missing
    return Row(
        settings,
        size,
        number,
        divide(memory, steps.rehearsal.run, processes),
        cost,
        train.precision,
        round(to_steps(train.epochs, train.steps, sampler.steps_per_epoch, 0)) if known else None,
        None if grid.limit is None else steps.largest(size, number, processes, grid.limit),
        missing,
    )


def _sampler(checked: CheckedRecipe, processes: int, num_samples: int) -> BatchSampler:
    world = World(0, processes, 0, torch.device("cpu"), processes)
    return make_sampler(BuildContext(checked, world), num_samples)


class _Steps:
    """The steps of a rehearsal, each taken once."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        self._taken: dict[tuple[int, int], Memory] = {}
        self._costs: dict[tuple[int, int], StepCost] = {}
        self._largest: dict[tuple[int, int, int], int] = {}

    @cached_property
    def num_samples(self) -> int:
        """The samples of the training data."""
        return len(self.rehearsal.run.train_loader.dataset)

    def take(self, size: int, number: int) -> Memory:
        """What a step of micro-batches of this size needs; more than two need as much as two."""
        key = size, min(2, number)
        if key not in self._taken:
            self._taken[key] = self.rehearsal.step(*key)
        return self._taken[key]

    def take_counted(self, size: int, number: int) -> tuple[Memory, StepCost]:
        """What a step needs, and what its operators compute and move."""
        key = size, min(2, number)
        if key not in self._costs:
            with CostCounter().count(self.rehearsal.run.optimizer) as cost:
                self._taken[key] = self.rehearsal.step(*key)
            self._costs[key] = cost
        return self._taken[key], self._costs[key].repeated(number / key[1])

    def largest(self, size: int, number: int, processes: int, limit: int) -> int:
        """The most samples of a micro-batch that fit."""
        key = min(2, number), processes, limit
        if key not in self._largest:
            known = [each for each, passes in self._taken if passes == key[0]]
            most = min(_MOST, self.num_samples)
            # Where one number of passes ends, another is not far.
            start = next((each for each in self._largest.values() if each), size)

            def total(size: int) -> int:
                return divide(self.take(size, number), self.rehearsal.run, processes).total

            tried = {each: total(each) for each in known}
            self._largest[key] = largest_micro_batch(total, start, limit, most, tried)
        return self._largest[key]


def largest_micro_batch(
    total: Callable[[int], int], start: int, limit: int, most: int = _MOST, known: Mapping[int, int] | None = None
) -> int:
    """The most samples, up to `most`, of a micro-batch whose step takes at most `limit` bytes; 0 if one takes more.

    `total` gives the bytes that a step of so many samples takes, and `known` those that were taken already. Memory
    grows about evenly with samples, so each guess is made by the line through the nearest two steps, and tried.
    """
    tried, size = dict(known or {}), min(start, most)
    for _ in range(most.bit_length() + 1):
        tried[size] = total(size)
        fitting = max((each for each in tried if tried[each] <= limit), default=0)
        failing = min((each for each in tried if tried[each] > limit), default=most + 1)
        if failing - fitting <= 1:
            break
        size = min(max(_guess(tried, limit), fitting + 1), failing - 1)
    return fitting


def _guess(tried: Mapping[int, int], limit: int) -> int:
    """Where the line through the two steps nearest to the limit reaches it."""
    if len(tried) == 1:
        ((size, _),) = tried.items()
        return _LEVER * size
    (one, low), (other, high) = sorted(tried.items(), key=lambda item: abs(item[1] - limit))[:2]
    slope = (high - low) / (other - one)
    return int(one + (limit - low) / slope) if slope > 0 else 2 * max(tried)
