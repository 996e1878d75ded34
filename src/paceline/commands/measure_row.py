"""Real steps of one row of a plan, in fresh processes: started as `python -m paceline.commands.measure_row`.

They are measured as a plan predicts them: bytes of tensors, growth of the process, seconds.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.errors import PacelineError
from paceline.core.process import free_memory, keep_freed_memory, return_freed_memory
from paceline.core.temporary import temporary_folder
from paceline.core.user_code import named_error
from paceline.core.world import World, join
from paceline.data.batch import Batch
from paceline.data.loader import MicroBatch, StepBatch
from paceline.data.split_loader import SplitLoader
from paceline.engine.evaluate import num_parallel
from paceline.engine.run import Run
from paceline.engine.step import train_step
from paceline.launch.environment import LAUNCHED, take_place
from paceline.launch.launcher import launch
from paceline.launch.machines import Launch
from paceline.plan.grid import Grid
from paceline.plan.memory import MemoryTracker
from paceline.plan.rehearse import (
    average_from_the_start,
    evaluate_together,
    evaluation_memory,
    rehearse,
    training_phases,
)
from paceline.plan.rows import Row, Unrehearsed
from paceline.plan.surrogate import Shape, SurrogateBuilder, largest_draw
from paceline.recipe.build_data import make_split_loaders
from paceline.recipe.user_modules import read_checked
from paceline.recipe.validate import CheckedRecipe

_MOST_SKIPPED = 16  # steps: the loss scale is 2**16 at first, and half of it after each
_DIFFERENT = 8  # samples that are read; a larger batch repeats them
_ROOM, _LIBRARIES = 1.5, 2**30  # times the limit, and bytes beside it, that a process may take


class Measured(NamedTuple):
    """What real steps took, on this process's device."""

    tensor_bytes: int
    """Of all tensors at the moment when they are most, within a step."""
    resident_bytes: int
    """The most that the process grew by since before the model was built; of a GPU, what torch reserved there."""
    step_seconds: float
    """The median of the steps, without loading data."""


class OutOfMemoryError(PacelineError):
    """A process got no more memory, or took more than it may."""


@dataclass(frozen=True)
class Trial:
    """What is measured."""

    recipe: str
    overrides: Sequence[str]
    use: Sequence[str]
    shape: Sequence[int]
    processes: int
    micro_batch_size: int
    num_micro_batches: int
    limit: int
    """Bytes of a device; a process on a CPU that takes far more fails."""
    steps: int = 3
    evaluates: bool = True

    @classmethod
    def of(
        cls, grid: Grid, row: Row | Unrehearsed, modules: Sequence[str], micro_batch_size: int | None = None
    ) -> Trial:
        """The trial of a row; with `micro_batch_size`, of a step with micro-batches of that many samples."""
        overrides = [*grid.fixed, *row.overrides, "model.weights=null", "train.compile=false"]
        size, number = row.micro_batch_size, row.num_micro_batches
        if micro_batch_size is not None:
            size, number = micro_batch_size, min(2, number)  # more of them take no more memory
        limit = min(free_memory(), grid.limit or free_memory()) // (row.processes if grid.is_shared else 1)
        return cls(grid.reference, overrides, modules, grid.shape, row.processes, size, number, limit)


def measure_row(trial: Trial) -> Measured:
    """What the row takes in fresh processes: the most of all of them."""
    with temporary_folder() as folder:
        (folder / "trial.json").write_text(json.dumps(asdict(trial)), encoding="utf-8")
        variables = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        command = [sys.executable, "-P", "-m", "paceline.commands.measure_row", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank-*.json"))]
        failed = [each["error"] for each in found if "error" in each]
        if failed or done.returncode == -signal.SIGKILL:
            raise OutOfMemoryError(failed[0] if failed else "the system ended the process")
        if done.returncode or len(found) < trial.processes:
            last = (done.stderr.strip() or f"the trial ended with exit code {done.returncode}").splitlines()[-1]
            raise PacelineError(last)
    return Measured(*(max(values) for values in zip(*(each["measured"] for each in found), strict=True)))


def main(folder: Path) -> int:
    """Measure what a folder says, and write the result there, as each of its processes."""
    trial = Trial(**json.loads((folder / "trial.json").read_text(encoding="utf-8")))
    place = take_place()
    if trial.processes > 1 and place is None:
        command = [sys.executable, "-P", "-m", "paceline.commands.measure_row", str(folder)]
        return launch(command, Launch(trial.processes, restarts=0))
    rank = place.rank if place else 0
    result: dict[str, object]
    try:
        result = {"measured": _measure(trial)}
    except PacelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if not _is_out_of_memory(error):
            if (named := named_error(error)) is None:
                raise
            print(named, file=sys.stderr)
            return named.exit_code
        result = {"error": str(error).splitlines()[0] if str(error) else "out of memory"}
    (folder / f"rank-{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    return 0 if "measured" in result else 1


def _measure(trial: Trial) -> Measured:
    checked, shape = read_checked(trial.recipe, trial.overrides, trial.use), Shape(*trial.shape)
    # Loads every library that a step needs, so that the process grows by the run alone. What fake tensors cannot follow
    # is measured all the same.
    with suppress(Exception), rehearse(checked, min(2, trial.processes), shape):
        pass
    if not torch.cuda.is_available():
        _limit_memory(trial.limit)
    world = join(checked.recipe.train.device)
    with world.together():
        sizes = trial.micro_batch_size, trial.num_micro_batches
        return measure_steps(checked, world, shape, *sizes, trial.steps, trial.evaluates)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def measure_steps(
    checked: CheckedRecipe,
    world: World,
    shape: Shape,
    micro_batch_size: int,
    micro_batches: int,
    steps: int = 3,
    evaluates: bool = True,
) -> Measured:
    """Take real steps on batches of this size in each phase of the run, evaluate some batches, and measure both.

    Of a phase, the first step makes what stays from step to step, and the second one is counted; in the last phase,
    others are timed. Those that are skipped, while the loss scale of fp16 falls to one that does not overflow, do not
    count.
    """
    builder = SurrogateBuilder(checked, world, shape)
    loaders = make_split_loaders(builder)
    loader = loaders["train"]
    example = loader.fetch(0, np.arange(min(_DIFFERENT, micro_batch_size, len(loader.dataset))))
    _use_largest_sizes(loader, example)
    batch = _repeat(example, micro_batch_size)
    before = _begin_growth(world.device)
    tracker = MemoryTracker()
    with tracker:
        run = builder.run(Path("runs"), loaders)
        return_freed_memory()  # a run keeps some: what is counted is what it needs
        run.state.choices.channels_last = run.state.choices.channels_last or False
        run.freezing.train_mode(run.model)
        average_from_the_start(run)
        peaks = []
        for phase in training_phases(run):
            if phase.step:
                run.unfreeze(phase.step)
            _take_counted_step(run, batch, micro_batches, tracker)
            peaks.append(tracker.peak.total)
        peaks += _evaluate(run, tracker) if evaluates else ()
    grown = _growth(world.device, before)
    keep_freed_memory()
    seconds = [_take_step(run, batch, micro_batches) for _ in range(steps)]
    return Measured(max(peaks), grown, statistics.median(seconds))


def _take_counted_step(run: Run, batch: Batch, micro_batches: int, tracker: MemoryTracker) -> None:
    """Take steps until two changed the weights; the tracker then has the peak of the second."""
    updates: list[object] = []
    handle = run.optimizer.register_step_post_hook(lambda *_: updates.append(None))
    with tracker.watch(run.model, run.optimizer):
        for _ in range(_MOST_SKIPPED + 2):
            tracker.reset_peak()
            _take_step(run, batch, micro_batches, tracker)
            if len(updates) == 2:
                break
    handle.remove()


def _evaluate(run: Run, tracker: MemoryTracker) -> list[int]:
    """The bytes of evaluating each split: as many batches at once as a run has, as far as resident memory goes."""
    peaks = []
    for split, each in run.evaluations.items():
        parallel, size = num_parallel(run, each), min(each.batch_size, len(each.loader.dataset))
        some = each.loader.fetch(0, np.arange(1))
        each.loader.fetch = lambda epoch, ids, some=some: _repeat(some, len(ids))  # type: ignore[method-assign,misc]
        memory, _ = evaluation_memory(run, split, size, parallel, tracker, is_fake=False)
        peaks.append(memory.total)
        if parallel > 1:  # threads, whose tensors are not tracked
            evaluate_together(run, split, size, parallel)
    return peaks


def _take_step(run: Run, batch: Batch, number: int, tracker: MemoryTracker | None = None) -> float:
    """The seconds of a step; all have one number, so that none begins a phase."""
    first, world = run.world.rank * number, run.world.size
    held = [MicroBatch(0, first + index, 0, Batch(batch)) for index in range(number)]
    if tracker:
        tracker.add(batch.values(), "activations")
    _wait(run.world.device)
    begin = time.perf_counter()
    train_step(run, StepBatch(0, number * world * batch.size, number * world, held))
    _wait(run.world.device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _use_largest_sizes(loader: SplitLoader, example: Batch) -> None:
    """Let transforms that draw a size for each step draw the largest one, as the plan does."""
    one = _repeat(example, 1)
    loader._draw_for_step = lambda step, number: largest_draw(loader, number, lambda: Batch(one))  # type: ignore[method-assign]


def _repeat(example: Batch, size: int) -> Batch:
    """The samples again and again until there are as many as wanted."""
    places = [index % example.size for index in range(size)]

    def repeat(value: Any) -> Any:
        return value[places] if isinstance(value, Tensor) else [value[place] for place in places]

    return Batch({name: repeat(value) for name, value in example.items()})


def _limit_memory(limit: int) -> None:
    """Have this process fail, rather than the machine, if it takes far more than `limit` bytes beyond what it has."""
    ceiling = _status("VmData") + round(_ROOM * limit) + _LIBRARIES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (ceiling if hard == resource.RLIM_INFINITY else min(ceiling, hard), hard))


def _begin_growth(device: torch.device) -> int:
    """What the process has now, when libraries have taken what they need."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    images = torch.ones(2, 8, 16, 16, requires_grad=True)
    F.conv2d(images, torch.ones(8, 8, 3, 3)).sum().backward()  # type: ignore[no-untyped-call]
    del images
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    return _status("VmRSS")


def _growth(device: torch.device, before: int) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else _status("VmHWM") - before


def _status(name: str) -> int:
    """A number of bytes that the system keeps of this process."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
