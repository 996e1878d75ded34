"""`paceline slurm`: print a Slurm job script that requeues itself when the time limit ends first."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.common import add_recipe, read_recipe
from paceline.core.errors import Stopped, UsageError

if TYPE_CHECKING:
    from paceline.recipe.schema import Recipe

_WARNING_SECONDS = 120  # before the time limit, for the run to save its state


@dataclass(frozen=True)
class Job:
    """The name and the resources of a job."""

    name: str
    nodes: int = 1
    processes: int = 1
    time: str | None = None
    needs_gpus: bool = False
    programs: Path | None = None  # the folder of the paceline command, if it may not be on the path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument("--procs", type=int, default=1, metavar="N", help="processes per machine (default: 1)")
    parser.add_argument("--time", metavar="HH:MM:SS", help="time limit of one job")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the script here (default: standard output)")


def main(options: argparse.Namespace) -> int:
    """Print the script, or write it to a file."""
    for name in ("nodes", "procs"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name}: expected a number ≥ 1, got {getattr(options, name)}")
    check_time(options.time)
    recipe = read_recipe(options).recipe
    used = [word for module in options.use for word in ("--use", module)]
    # Slurm starts the processes; with a single task nothing else may.
    alone = ["--procs", "1"] if options.nodes * options.procs == 1 else []
    job = make_job(recipe, recipe.name, options.time, options.procs, options.nodes)
    script = job_script(job, ["train", options.recipe, *options.overrides, *used, *alone])
    if options.out is None:
        print(script, end="")
        return 0
    try:
        options.out.write_text(script, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {options.out}: {error.strerror}") from error
    print(f"wrote {options.out}; submit it with: sbatch {options.out}", file=sys.stderr)
    return 0


def check_time(limit: str | None) -> None:
    """Raise UsageError for a time limit that Slurm would refuse."""
    if limit and not re.fullmatch(r"(\d+-)?\d+(:\d{1,2}){0,2}", limit):
        raise UsageError(f"--time: expected HH:MM:SS or DAYS-HH:MM:SS, got {limit!r}")


def make_job(recipe: Recipe, name: str, limit: str | None, processes: int, nodes: int = 1) -> Job:
    """The job of a recipe."""
    return Job(name, nodes, processes, limit, recipe.train.device.startswith("cuda"), _folder_of_command())


def _folder_of_command() -> Path | None:
    """The folder of the paceline command, which may not be on the path of a job."""
    command = Path(sys.argv[0]).absolute()
    if command.name == "paceline":
        return command.parent
    beside = Path(sys.executable).parent / "paceline"
    found = str(beside) if beside.exists() else shutil.which("paceline")
    return Path(found).absolute().parent if found else None


def job_script(job: Job, arguments: Sequence[str]) -> str:
    """The text of a script, for `sbatch`, whose tasks all run the command with these arguments."""
    return _script(job, [], shlex.join(["paceline", *arguments]), {"output": "%x-%j.log"})


def array_script(job: Job, tasks: Mapping[int, Sequence[str]], at_once: int | None = None) -> str:
    """The text of a script whose task N runs the command with arguments N; `at_once` limits how many run together."""
    cases = [f"    {number}) words=({shlex.join(arguments)}) ;;" for number, arguments in tasks.items()]
    choice = ['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac", ""]
    limit = f"%{at_once}" if at_once else ""
    array = {"array": ",".join(map(str, tasks)) + limit, "output": "%x-%A_%a.log"}
    return _script(job, choice, 'paceline "${words[@]}"', array)


def _script(job: Job, opening: Sequence[str], command: str, more: Mapping[str, str]) -> str:
    wanted = {
        "job-name": re.sub(r"[^\w.-]+", "-", job.name),
        "nodes": job.nodes,
        "ntasks-per-node": job.processes,
        "gpus-per-node": job.processes if job.needs_gpus else None,
        "time": job.time,
        "signal": f"B:USR1@{_WARNING_SECONDS}",
        "open-mode": "append",
        **more,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in wanted.items() if value is not None]
    path = [f"export PATH={shlex.quote(str(job.programs))}:$PATH"] if job.programs else []
    body = _BODY.format(seconds=_WARNING_SECONDS, stopped=Stopped.exit_code, command=command)
    return "\n".join(["#!/bin/bash", *lines, "#SBATCH --requeue", "", *path, *opening, body])


_BODY = """\
# Each task is one process of the run. When one has ended, the others get time to save.
srun --kill-on-bad-exit=0 --wait={seconds} {command} &
step=$!

# {seconds} s before the time limit this script gets SIGUSR1; srun forwards it, and the run saves its state.
trap 'kill -USR1 "$step"' USR1
trap 'kill -TERM "$step"' TERM

# A signal interrupts `wait` with a code above 128 while the step continues.
wait "$step"
code=$?
while [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null; do
    wait "$step"
    code=$?
done
if [ "$code" -gt 128 ]; then
    wait "$step"
    code=$?
fi

if [ "$code" -eq {stopped} ]; then
    echo "stopped before the end: requeued, to resume from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
"""
