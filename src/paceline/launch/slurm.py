"""Slurm job scripts, of a run and of an array of runs, that requeue themselves when the time limit ends first."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import Stopped

_WARNING_SECONDS = 120  # before the time limit, for the run to save its state


@dataclass(frozen=True)
class Job:
    """The resources of a job, and the arguments of the command that runs in every task."""

    name: str
    arguments: Sequence[str] = ()
    nodes: int = 1
    processes: int = 1
    time: str | None = None
    partition: str | None = None
    needs_gpus: bool = False
    programs: Path | None = None  # the folder of the paceline command, if it may not be on the path


def job_script(job: Job) -> str:
    """The text of the script, for `sbatch`."""
    return _script(job, [], shlex.join(["paceline", *job.arguments]), {"output": "%x-%j.log"})


def array_script(job: Job, tasks: Mapping[int, Sequence[str]], at_once: int | None = None) -> str:
    """The text of a script whose task N runs the command with arguments N; `at_once` limits how many run together."""
    cases = [f"    {number}) words=({shlex.join(arguments)}) ;;" for number, arguments in tasks.items()]
    choice = ['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac", ""]
    limit = f"%{at_once}" if at_once else ""
    array = {"array": ",".join(map(str, tasks)) + limit, "output": "%x-%A_%a.log"}
    return _script(job, choice, 'paceline "${words[@]}"', array)


def _script(job: Job, opening: Sequence[str], command: str, more: Mapping[str, str]) -> str:
    wanted = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.processes,
        "gpus-per-node": job.processes if job.needs_gpus else None,
        "time": job.time,
        "partition": job.partition,
        "signal": f"B:USR1@{_WARNING_SECONDS}",
        "open-mode": "append",
        **more,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in wanted.items() if value is not None]
    path = [f"export PATH={shlex.quote(str(job.programs))}:$PATH"] if job.programs else []
    body = _BODY.format(**_words(), command=command)
    return "\n".join(["#!/bin/bash", *lines, "#SBATCH --requeue", "", *path, *opening, body])


def _words() -> dict[str, int]:
    return {"seconds": _WARNING_SECONDS, "stopped": Stopped.exit_code}


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
