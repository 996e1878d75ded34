"""`sweep.json`: the trials of a sweep and the state of each; a sweep that was killed continues from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core.atomic_write import is_partial, replace_file
from paceline.core.errors import UsageError
from paceline.core.regular_file import read_json
from paceline.core.text import join_first
from paceline.loggers.results import read_state
from paceline.run.directory import LOCK, check_free

SWEEP = "sweep.json"
_MAX_BYTES = 1 << 24


@dataclass
class Trial:
    """One run of a sweep: the folder in the sweep's, its own overrides, and how it stands."""

    run: str
    overrides: tuple[str, ...]
    state: str = "waiting"
    """waiting, running, stopped, failed or finished."""
    exit_code: int | None = None
    reason: str | None = None
    """Why it failed."""

    def __str__(self) -> str:
        return f"{self.run}  {' '.join(self.overrides)}"


@dataclass(frozen=True)
class Command:
    """What all trials of a sweep share."""

    recipe: str
    overrides: list[str]
    use: list[str]


class SweepFile:
    """The trials of a sweep; known ones keep their runs, and new ones are added."""

    def __init__(self, out: Path, command: Command, wanted: Sequence[tuple[str, ...]]) -> None:
        self.out, self._command = out, command
        self._trials = {trial.overrides: trial for trial in read_trials(out, command)}
        for overrides in wanted:
            if overrides not in self._trials:
                self._trials[overrides] = Trial(f"{len(self._trials):02d}", overrides)
        self.wanted = [self._trials[overrides] for overrides in wanted]
        for trial in self.trials:
            self._refresh(trial)

    @property
    def trials(self) -> list[Trial]:
        """All trials, also those that only earlier commands asked for."""
        return list(self._trials.values())

    def folder(self, trial: Trial) -> Path:
        """The run directory of a trial."""
        return self.out / trial.run

    def log(self, trial: Trial) -> Path:
        """The file that gets what a trial prints."""
        return self.out / "logs" / f"{trial.run}.log"

    def write(self) -> None:
        """Write the file, atomically."""
        content = asdict(self._command) | {"trials": [asdict(trial) for trial in self.trials]}
        replace_file(self.out / SWEEP, f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode())

    def _refresh(self, trial: Trial) -> None:
        """Take the state from the run directory, where a job of Slurm or a user may have continued the run."""
        found = read_state(self.folder(trial))
        if found == "finished":
            trial.state, trial.exit_code, trial.reason = "finished", 0, None
        elif _is_in_use(self.folder(trial)):
            trial.state = "running"
        elif found == "failed" and trial.state != "failed":
            trial.state, trial.reason = "failed", failure_reason(self.folder(trial), self.log(trial))
        elif trial.state != "failed":
            trial.state = "stopped" if self.folder(trial).is_dir() else "waiting"


def read_trials(out: Path, command: Command) -> list[Trial]:
    """The trials in a sweep's folder, none if it is new; UsageError if the folder holds something else."""
    held = sorted(path.name for path in out.iterdir() if not is_partial(path.name)) if out.is_dir() else []
    found: Any = read_json(out / SWEEP, _MAX_BYTES)
    if set(held) <= {LOCK}:
        return []
    if not isinstance(found, dict) or "trials" not in found:
        raise UsageError(f"{out} is not the folder of a sweep: it holds {join_first(held, 5)}; choose one with --out")
    for key, value in asdict(command).items():
        if found.get(key) != value:
            raise UsageError(
                f"{out} holds a sweep with other settings: {key} was {json.dumps(found.get(key))}, is"
                f" {json.dumps(value)}; choose another folder with --out"
            )
    try:
        return [Trial(**each | {"overrides": tuple(each["overrides"])}) for each in found["trials"]]
    except (TypeError, KeyError) as error:
        raise UsageError(f"{out / SWEEP}: was changed or damaged; remove it, or choose another --out") from error


def failure_reason(folder: Path, log: Path) -> str:
    """Why a run failed: what its status says, else the last line that it printed."""
    status = read_json(folder / "status.json")
    if isinstance(status, dict) and status.get("state") == "failed" and status.get("reason"):
        return str(status["reason"])
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _is_in_use(folder: Path) -> bool:
    try:
        check_free(folder)
    except UsageError:
        return True
    return False
