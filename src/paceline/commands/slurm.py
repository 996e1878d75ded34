"""`paceline slurm`: print a Slurm job script for a recipe."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from paceline.commands.common import read_recipe
from paceline.core.errors import UsageError
from paceline.launch.slurm import Job, job_script


def main(options: argparse.Namespace) -> int:
    """Print the script, or write it to a file."""
    _check(options)
    check_job(options)
    recipe = read_recipe(options).recipe
    used = [word for module in options.use for word in ("--use", module)]
    # Slurm starts the processes; with a single task nothing else may.
    alone = ["--procs", "1"] if options.nodes * options.procs == 1 else []
    script = job_script(
        Job(
            name=re.sub(r"[^\w.-]+", "-", recipe.name),
            arguments=["train", options.recipe, *options.overrides, *used, *alone],
            nodes=options.nodes,
            processes=options.procs,
            time=options.time,
            partition=options.partition,
            needs_gpus=recipe.train.device.startswith("cuda"),
            programs=folder_of_command(),
        )
    )
    if options.out is None:
        print(script, end="")
        return 0
    try:
        options.out.write_text(script, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {options.out}: {error.strerror}") from error
    print(f"wrote {options.out}; submit it with: sbatch {options.out}", file=sys.stderr)
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("nodes", "procs"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name}: expected a number ≥ 1, got {getattr(options, name)}")


def check_job(options: argparse.Namespace) -> None:
    """Raise UsageError for a time limit or a partition that Slurm would refuse."""
    if options.time and not re.fullmatch(r"(\d+-)?\d+(:\d{1,2}){0,2}", options.time):
        raise UsageError(f"--time: expected HH:MM:SS or DAYS-HH:MM:SS, got {options.time!r}")
    if options.partition and not re.fullmatch(r"[\w.,+-]+", options.partition):
        raise UsageError(f"--partition: expected the name of a partition, got {options.partition!r}")


def folder_of_command() -> Path | None:
    """The folder of the paceline command, which may not be on the path of a job."""
    command = Path(sys.argv[0]).absolute()
    if command.name == "paceline":
        return command.parent
    beside = Path(sys.executable).parent / "paceline"
    found = str(beside) if beside.exists() else shutil.which("paceline")
    return Path(found).absolute().parent if found else None
