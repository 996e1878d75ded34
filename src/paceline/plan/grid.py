"""Rows of a plan: what a recipe needs with other settings, rehearsed side by side on the cores of this machine."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from paceline.core.errors import PacelineError, RecipeError, TrainingError
from paceline.core.intervals import to_steps
from paceline.core.process import num_cores
from paceline.core.torch_private import FakeTensorMode
from paceline.core.user_code import named_error
from paceline.core.world import World
from paceline.data.sampler import BatchSampler
from paceline.plan.communication import sent_bytes
from paceline.plan.phases import Phase
from paceline.plan.refusal import is_refusal, limit_of_fake_tensors
from paceline.plan.rehearse import Evaluated, Rehearsal, rehearse
from paceline.plan.rows import Combination, PlannedPhase, Refused, Row, Settings, Unrehearsed
from paceline.plan.shards import divide, rehearsed_processes
from paceline.plan.steps import Steps
from paceline.plan.surrogate import Shape, SurrogateBuilder
from paceline.recipe.build_context import BuildContext
from paceline.recipe.build_data import make_sampler, make_split_loader
from paceline.recipe.load import load
from paceline.recipe.schema import Train
from paceline.recipe.validate import CheckedRecipe, validate

_TRY = "take real steps instead: paceline plan RECIPE --measure"
_DIVIDE_ALONE = frozenset({"procs", "train.micro_batch_size", "data.batch_size"})  # a step, but not what it computes


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

    def limit_of_process(self, processes: int) -> int | None:
        """The bytes that each of so many processes may take."""
        return None if self.limit is None else self.limit // (processes if self.is_shared else 1)

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
            found[index] = Refused(each, str(error), type(error))
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
            return _plan_rows(grid, rehearsal, group.rows)
    except Exception as error:
        if reason := limit_of_fake_tensors(error):
            return {place: _refuse(grid, settings, f"{reason}; {_TRY}") for place, settings in group.rows.items()}
        if is_refusal(error):
            kind = type(error) if isinstance(error, PacelineError) else RecipeError
            return {place: Refused(settings, str(error), kind) for place, settings in group.rows.items()}
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
        return Unrehearsed(
            settings, reason, RecipeError, *_divide_step(_sampler(checked, processes, len(data)), processes)
        )
    except PacelineError as error:
        return Refused(settings, str(error), type(error))


def _plan_rows(grid: Grid, rehearsal: Rehearsal, rows: Mapping[int, Settings]) -> dict[int, Row | Refused]:
    """Rows that one rehearsal serves, which goes through the phases of the run once."""
    found: dict[int, Row | Refused] = {}
    divided: dict[int, _Division] = {}
    for place, settings in rows.items():
        try:
            checked = grid.check(settings)
            sampler = _sampler(checked, int(settings["procs"]), len(rehearsal.run.train_loader.dataset))
            divided[place] = _Division(settings, checked.recipe.train, sampler)
        except PacelineError as error:
            found[place] = Refused(settings, str(error), type(error))
    training: dict[int, list[PlannedPhase]] = {place: [] for place in divided}
    for phase in rehearsal.phases():
        steps = Steps(rehearsal)
        for place, division in divided.items():
            training[place].append(_plan_phase(grid, steps, phase, division))
    evaluated = list(rehearsal.evaluations(grid.is_cpu)) if divided else []
    for place, division in divided.items():
        evaluations = [_plan_evaluation(grid, rehearsal, each, division.processes) for each in evaluated]
        found[place] = _make_row(grid, rehearsal, division, training[place], evaluations)
    return found


class _Division(NamedTuple):
    """How a row divides its steps."""

    settings: Settings
    train: Train
    sampler: BatchSampler

    @property
    def processes(self) -> int:
        """Their number."""
        return int(self.settings["procs"])


def _plan_phase(grid: Grid, steps: Steps, phase: Phase, division: _Division) -> PlannedPhase:
    run, processes = steps.rehearsal.run, division.processes
    size, number = _divide_step(division.sampler, processes)
    memory, cost = steps.take_counted(size, number)
    limit = grid.limit_of_process(processes)
    return PlannedPhase(
        phase.name,
        divide(memory, run, processes),
        None if limit is None else steps.largest(number, processes, limit),
        "train.micro_batch_size",
        phase.share,
        cost,
        sent_bytes(division.train, run.model, processes, number),
    )


def _plan_evaluation(grid: Grid, rehearsal: Rehearsal, evaluated: Evaluated, processes: int) -> PlannedPhase:
    evaluated = evaluated._replace(memory=divide(evaluated.memory, rehearsal.run, processes))
    limit = grid.limit_of_process(processes)
    largest = None if limit is None else evaluated.largest(limit)
    return PlannedPhase(evaluated.name, evaluated.memory, largest, "evaluate.batch_size")


def _make_row(
    grid: Grid,
    rehearsal: Rehearsal,
    division: _Division,
    training: Sequence[PlannedPhase],
    evaluations: Sequence[PlannedPhase],
) -> Row:
    train, sampler = division.train, division.sampler
    size, number = _divide_step(sampler, division.processes)
    known = train.steps is not None or not rehearsal.missing
    num_steps = round(to_steps(train.epochs, train.steps, sampler.steps_per_epoch, 0)) if known else None
    sharing = division.processes if grid.is_shared else 1
    settings, missing = division.settings, rehearsal.missing
    return Row(settings, size, number, training, evaluations, train.precision, num_steps, missing, sharing)


def _sampler(checked: CheckedRecipe, processes: int, num_samples: int) -> BatchSampler:
    world = World(0, processes, 0, torch.device("cpu"), processes)
    return make_sampler(BuildContext(checked, world), num_samples)


def _divide_step(sampler: BatchSampler, processes: int) -> tuple[int, int]:
    """The samples of a micro-batch, and how many micro-batches a process computes in a step."""
    size = min(sampler.micro_batch_size, -(-sampler.batch // processes))
    return size, -(-sampler.batch // (size * processes))
