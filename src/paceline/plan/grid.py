"""Rows of a plan: what a recipe needs with other settings, rehearsed side by side on the cores of this machine."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.core.errors import PacelineError, TrainingError
from paceline.core.intervals import to_steps
from paceline.core.process import num_cores
from paceline.core.user_code import named_error
from paceline.core.world import World
from paceline.data.sampler import BatchSampler
from paceline.plan.communication import sent_bytes
from paceline.plan.cost import CostCounter, StepCost
from paceline.plan.growth import MOST_SAMPLES, Growth, largest_micro_batch, peak_of
from paceline.plan.memory import Memory, Timeline
from paceline.plan.refusal import is_refusal, limit_of_fake_tensors
from paceline.plan.rehearse import Rehearsal, rehearse
from paceline.plan.shards import divide, rehearsed_processes
from paceline.plan.surrogate import Shape, SurrogateBuilder
from paceline.recipe.build_context import BuildContext
from paceline.recipe.build_data import make_sampler, make_split_loader
from paceline.recipe.load import load
from paceline.recipe.validate import CheckedRecipe, validate

Settings = Mapping[str, str]
"""The recipe keys in which rows differ, and "procs"."""

_TRY = "take real steps instead: paceline plan RECIPE --measure"
_FEWEST = 2  # samples of the steps between which memory grows evenly
_MANY = 32  # samples from which the peak grows evenly, in models that go through the images of a batch one by one
_DIVIDE_ALONE = frozenset({"procs", "train.micro_batch_size", "data.batch_size"})  # a step, but not what it computes


@dataclass(frozen=True)
class Combination:
    """Settings of a row."""

    settings: Settings

    @property
    def overrides(self) -> list[str]:
        """The settings as they are written on a command line."""
        return [f"{key}={value}" for key, value in self.settings.items() if key != "procs"]

    @property
    def processes(self) -> int:
        """The number of processes."""
        return int(self.settings["procs"])

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.settings.items())


@dataclass(frozen=True)
class Row(Combination):
    """What one combination of settings needs on each device."""

    micro_batch_size: int
    num_micro_batches: int
    """How many micro-batches a process computes in a step."""
    memory: Memory
    cost: StepCost
    precision: str
    sent_bytes: int | None
    """What a process sends to others in a step; None if the strategy's ways are not known."""
    num_steps: int | None
    """Steps of the run; None if they depend on data that is not here."""
    largest_micro_batch: int | None = None
    """The most samples of a micro-batch that fit; None without a limit, 0 if not even one fits."""
    missing: str = ""
    """Why samples were assumed rather than read; empty if they were read."""
    num_sharing: int = 1
    """How many processes share the memory of a device: all of them on a CPU."""

    @property
    def shared_bytes(self) -> int:
        """What the processes that share a device need together."""
        return self.num_sharing * self.memory.total

    def fits(self, limit: int) -> bool:
        """Whether the processes that share a device need no more than its `limit` bytes."""
        return self.shared_bytes <= limit


@dataclass(frozen=True)
class Refused(Combination):
    """A combination that cannot be planned, and why."""

    reason: str


@dataclass(frozen=True)
class Unrehearsed(Refused):
    """A combination that fake tensors cannot follow: real steps can be taken."""

    micro_batch_size: int
    num_micro_batches: int


@dataclass(frozen=True)
class Grid:
    """What all rows have in common."""

    reference: str
    fixed: Sequence[str] = ()
    limit: int | None = None
    """Bytes of a device; if given, each row has the largest micro-batch within it."""
    shape: Shape = field(default_factory=Shape)
    is_cpu: bool = True
    """Whether the device is a CPU, where a skipped step needs no copies."""
    is_shared: bool = False
    """Whether `limit` is for all processes together, as on this machine's CPU; else it is for each of them."""

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
    groups: dict[tuple[object, ...], _Group] = {}
    for index, each in enumerate(settings):
        try:
            train = grid.check(each).recipe.train
        except PacelineError as error:
            found[index] = Refused(each, str(error))
            continue
        processes = rehearsed_processes(train.strategy.name, train.reproducible, int(each["procs"]))
        shared = tuple(item for item in each.items() if item[0] not in _DIVIDE_ALONE)
        groups.setdefault((processes, *shared), _Group(processes, {})).rows[index] = each

    def collect(rows: Mapping[int, Row | Refused]) -> None:
        found.update(rows)
        advance(len(rows))

    tasks = _share(list(groups.values()), num_cores())
    if len(tasks) < 2:
        for task in tasks:
            collect(_plan_groups(grid, task))
    else:
        FakeTensorMode()  # loads what each process would load again
        # Frozen: objects that are there already are not searched for garbage again and again.
        workers = min(num_cores(), len(tasks))
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), gc.freeze) as pool:
            for future in [pool.submit(_plan_groups, grid, task) for task in tasks]:
                collect(future.result())
    return [found[index] for index in range(len(settings))]


class _Group(NamedTuple):
    """Rows that one rehearsal serves, since they only divide a step in other ways."""

    processes: int
    rows: dict[int, Settings]
    """By their places."""


def _share(groups: Sequence[_Group], workers: int) -> list[list[_Group]]:
    """Groups that differ in their strategy alone together, since one learns from another what operators make."""
    if workers < 2:
        return [list(groups)]
    tasks: dict[tuple[object, ...], list[_Group]] = {}
    for group in groups:
        settings = next(iter(group.rows.values()))
        alike = tuple(item for item in settings.items() if item[0] not in {*_DIVIDE_ALONE, "train.strategy"})
        tasks.setdefault(alike, []).append(group)
    return list(tasks.values()) if len(tasks) >= workers else [[group] for group in groups]


def _plan_groups(grid: Grid, groups: Sequence[_Group]) -> dict[int, Row | Refused]:
    return {place: row for group in groups for place, row in _plan_group(grid, group).items()}


def _plan_group(grid: Grid, group: _Group) -> dict[int, Row | Refused]:
    first = Combination(next(iter(group.rows.values())))
    try:
        with rehearse(grid.check(first.settings), group.processes, grid.shape, grid.is_cpu) as rehearsal:
            steps = _Steps(rehearsal)
            return {place: _plan_row(grid, steps, settings) for place, settings in group.rows.items()}
    except Exception as error:
        if reason := limit_of_fake_tensors(error):
            return {place: _refuse(grid, settings, f"{reason}; {_TRY}") for place, settings in group.rows.items()}
        if is_refusal(error):
            return {place: Refused(settings, str(error)) for place, settings in group.rows.items()}
        # Here, since lines of a user's are found by the traceback, which stays in its process.
        if mistake := error if isinstance(error, TrainingError) else named_error(error):
            raise TrainingError(f"{first}: {mistake}") from error
        raise


def _refuse(grid: Grid, settings: Settings, reason: str) -> Refused:
    """What is known of a row without a rehearsal: how its steps are divided."""
    try:
        checked, processes = grid.check(settings), int(settings["procs"])
        builder = SurrogateBuilder(checked, World(0, 1, 0, torch.device("cpu")), grid.shape)
        data = make_split_loader(builder, "train", checked.recipe.data.train).dataset
        return Unrehearsed(settings, reason, *_divide_step(_sampler(checked, processes, len(data)), processes))
    except PacelineError as error:
        return Refused(settings, str(error))


def _plan_row(grid: Grid, steps: _Steps, settings: Settings) -> Row | Refused:
    processes = int(settings["procs"])
    try:
        checked = grid.check(settings)
        sampler = _sampler(checked, processes, steps.num_samples)
    except PacelineError as error:
        return Refused(settings, str(error))
    train, missing = checked.recipe.train, steps.rehearsal.missing
    size, number = _divide_step(sampler, processes)
    memory, cost = steps.take_counted(size, number)
    known = train.steps is not None or not missing
    num_sharing = processes if grid.is_shared else 1
    return Row(
        settings,
        size,
        number,
        divide(memory, steps.rehearsal.run, processes),
        cost,
        train.precision,
        sent_bytes(train, steps.rehearsal.run.model, processes, number),
        round(to_steps(train.epochs, train.steps, sampler.steps_per_epoch, 0)) if known else None,
        None if grid.limit is None else steps.largest(number, processes, grid.limit // num_sharing),
        missing,
        num_sharing,
    )


def _sampler(checked: CheckedRecipe, processes: int, num_samples: int) -> BatchSampler:
    world = World(0, processes, 0, torch.device("cpu"), processes)
    return make_sampler(BuildContext(checked, world), num_samples)


def _divide_step(sampler: BatchSampler, processes: int) -> tuple[int, int]:
    """The samples of a micro-batch, and how many micro-batches a process computes in a step."""
    size = min(sampler.micro_batch_size, -(-sampler.batch // processes))
    return size, -(-sampler.batch // (size * processes))


class _Steps:
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
