"""Rows of a plan: what a recipe needs with other settings, rehearsed side by side on the cores of this machine."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from paceline.core.errors import PacelineError, RecipeError, TrainingError
from paceline.core.intervals import to_steps
from paceline.core.process import num_cores
from paceline.core.torch_private import FakeTensorMode
from paceline.core.user_code import named_error
from paceline.core.world import World
from paceline.plan.cost import sent_bytes
from paceline.plan.fake_tensors import limit_of_fake_tensors
from paceline.plan.rehearse import Evaluated, Phase, Rehearsal, rehearse
from paceline.plan.rows import Combination, PlannedPhase, Refused, Row, Settings, Unrehearsed
from paceline.plan.steps import Steps, divide, rehearsed_processes
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
    """Whether the device is a CPU, where several batches are evaluated at once."""
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
    groups: dict[tuple[int, tuple[tuple[str, str], ...]], dict[int, Settings]] = {}  # what one rehearsal serves
    for index, each in enumerate(settings):
        try:
            train = grid.check(each).recipe.train
        except PacelineError as error:
            found[index] = Refused(each, str(error), type(error))
            continue
        processes = rehearsed_processes(train.strategy.name, train.reproducible, int(each["procs"]))
        shared = tuple(item for item in each.items() if item[0] not in _DIVIDE_ALONE)
        groups.setdefault((processes, shared), {})[index] = each

    def collect(rows: Mapping[int, Row | Refused]) -> None:
        found.update(rows)
        advance(len(rows))

    workers = min(num_cores(), len(groups))
    if workers < 2:
        for (processes, _), rows in groups.items():
            collect(_plan_group(grid, processes, rows))
    else:
        FakeTensorMode()  # loads what each process would load again
        # One process gets those that are alike but for their strategy: it learns once what operators make.
        alike = sorted(groups, key=lambda key: [item for item in key[1] if item[0] != "train.strategy"])
        sizes, members = [processes for processes, _ in alike], [groups[key] for key in alike]
        # Frozen: objects that are there already are not searched for garbage again and again.
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), gc.freeze) as pool:
            for planned in pool.map(
                partial(_plan_group, grid), sizes, members, chunksize=-(-len(alike) // (2 * workers))
            ):
                collect(planned)
    return [found[index] for index in range(len(settings))]


def _plan_group(grid: Grid, processes: int, rows: Mapping[int, Settings]) -> dict[int, Row | Refused]:
    """Rows that only divide a step in other ways, by one rehearsal."""
    first = Combination(next(iter(rows.values())))
    try:
        with rehearse(grid.check(first.settings), processes, grid.shape) as rehearsal:
            return _plan_rows(grid, rehearsal, rows)
    except Exception as error:
        if reason := limit_of_fake_tensors(error):
            return {place: _refuse(grid, settings, f"{reason}; {_TRY}") for place, settings in rows.items()}
        # What is wrong with the recipe, its data or the number of processes; else it is a mistake.
        if isinstance(error, PacelineError) and not isinstance(error, TrainingError | KeyError):
            return {place: Refused(settings, str(error), type(error)) for place, settings in rows.items()}
        # Here, since lines of a user's are found by the traceback, which stays in its process.
        if mistake := error if isinstance(error, TrainingError) else named_error(error):
            raise TrainingError(f"{first}: {mistake}") from error
        raise


def _refuse(grid: Grid, settings: Settings, reason: str) -> Refused:
    """What is known of a row without a rehearsal: how its steps are divided."""
    try:
        checked = grid.check(settings)
        builder = SurrogateBuilder(checked, World(0, 1, 0, torch.device("cpu")), grid.shape)
        data = make_split_loader(builder, "train", checked.recipe.data.train).dataset
        division = _divide_step(grid, settings, len(data))
    except PacelineError as error:
        return Refused(settings, str(error), type(error))
    return Unrehearsed(settings, reason, RecipeError, division.micro_batch_size, division.num_micro_batches)


class _Division(NamedTuple):
    """How a row divides its steps."""

    train: Train
    processes: int
    micro_batch_size: int
    num_micro_batches: int
    """How many a process computes in a step."""
    steps_per_epoch: int


def _divide_step(grid: Grid, settings: Settings, num_samples: int) -> _Division:
    checked, processes = grid.check(settings), int(settings["procs"])
    world = World(0, processes, 0, torch.device("cpu"), processes)
    sampler = make_sampler(BuildContext(checked, world), num_samples)
    size = min(sampler.micro_batch_size, -(-sampler.batch // processes))
    number = -(-sampler.batch // (size * processes))
    return _Division(checked.recipe.train, processes, size, number, sampler.steps_per_epoch)


def _plan_rows(grid: Grid, rehearsal: Rehearsal, rows: Mapping[int, Settings]) -> dict[int, Row | Refused]:
    """Rows that one rehearsal serves, which goes through the phases of the run once."""
    found: dict[int, Row | Refused] = {}
    divided: dict[int, _Division] = {}
    for place, settings in rows.items():
        try:
            divided[place] = _divide_step(grid, settings, len(rehearsal.run.train_loader.dataset))
        except PacelineError as error:
            found[place] = Refused(settings, str(error), type(error))
    training: dict[int, list[PlannedPhase]] = {place: [] for place in divided}
    for phase in rehearsal.phases():
        steps = Steps(rehearsal)
        for place, division in divided.items():
            training[place].append(_plan_phase(grid, steps, phase, division))
    evaluated = list(rehearsal.evaluations(grid.is_cpu)) if divided else []
    for place, division in divided.items():
        train, size, number = division.train, division.micro_batch_size, division.num_micro_batches
        evaluations = [_plan_evaluation(grid, rehearsal, each, division.processes) for each in evaluated]
        is_length_known = train.steps is not None or not rehearsal.missing
        length = to_steps(train.epochs, train.steps, division.steps_per_epoch, 0) if is_length_known else None
        found[place] = Row(
            rows[place],
            size,
            number,
            training[place],
            evaluations,
            train.precision,
            None if length is None else round(length),
            rehearsal.missing,
            division.processes if grid.is_shared else 1,
        )
    return found


def _plan_phase(grid: Grid, steps: Steps, phase: Phase, division: _Division) -> PlannedPhase:
    processes, size, number = division.processes, division.micro_batch_size, division.num_micro_batches
    taken, limit = steps.take(size, number), grid.limit_of_process(processes)
    return PlannedPhase(
        phase.name,
        divide(taken.memory, steps.run, processes),
        None if limit is None else steps.largest(number, processes, limit),
        "train.micro_batch_size",
        phase.share,
        taken.cost.repeated(number / min(2, number)),
        sent_bytes(division.train, steps.run.model, processes, number),
    )


def _plan_evaluation(grid: Grid, rehearsal: Rehearsal, evaluated: Evaluated, processes: int) -> PlannedPhase:
    evaluated = evaluated._replace(memory=divide(evaluated.memory, rehearsal.run, processes))
    limit = grid.limit_of_process(processes)
    largest = None if limit is None else evaluated.largest(limit)
    return PlannedPhase(evaluated.name, evaluated.memory, largest, "evaluate.batch_size")
