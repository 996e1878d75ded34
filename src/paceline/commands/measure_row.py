"""Real steps of one row of a plan, in fresh processes: started as `python -m paceline.commands.measure_row`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError
from paceline.core.process import free_memory
from paceline.core.temporary import temporary_folder
from paceline.launch.environment import LAUNCHED, take_place
from paceline.launch.launcher import launch
from paceline.launch.machines import Launch
from paceline.recipe.user_modules import read_checked

if TYPE_CHECKING:
    from paceline.plan.grid import Grid
    from paceline.plan.measure import Measured
    from paceline.plan.rows import Row, Unrehearsed


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
    from paceline.plan.measure import Measured

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
            from paceline.core.user_code import named_error

            if (named := named_error(error)) is None:
                raise
            print(named, file=sys.stderr)
            return named.exit_code
        result = {"error": str(error).splitlines()[0] if str(error) else "out of memory"}
    (folder / f"rank-{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    return 0 if "measured" in result else 1


def _measure(trial: Trial) -> Measured:
    import torch

    from paceline.core.world import join
    from paceline.plan.measure import limit_memory, measure_steps
    from paceline.plan.rehearse import rehearse
    from paceline.plan.surrogate import Shape

    checked = read_checked(trial.recipe, trial.overrides, trial.use)
    shape = Shape(*trial.shape)
    # Loads every library that a step needs, so that the process grows by the run alone. What fake tensors cannot follow
    # is measured all the same.
    with suppress(Exception), rehearse(checked, trial.processes, shape):
        pass
    if not torch.cuda.is_available():
        limit_memory(trial.limit)
    world = join(checked.recipe.train.device)
    with world.together():
        sizes = trial.micro_batch_size, trial.num_micro_batches
        return measure_steps(checked, world, shape, *sizes, trial.steps, trial.evaluates)


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
