"""The trials of a sweep: `sweep.json` with the state of each, from which a killed sweep continues, and their runs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.commands.common import progress_bar
from paceline.core.atomic_write import is_partial, replace_file
from paceline.core.errors import Stopped, UsageError
from paceline.core.file_lock import LOCK, is_held
from paceline.core.process import StopRequest
from paceline.core.regular_file import read_json
from paceline.core.text import join_first, pluralize
from paceline.launch.job_pool import JobPool
from paceline.launch.launcher import worker_command
from paceline.loggers.messages import duration
from paceline.loggers.results import read_state

SWEEP = "sweep.json"
_MAX_BYTES = 1 << 24
_POLL_SECONDS = 0.1


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


class SweepFile:
    """The trials of a sweep; known ones keep their runs, and new ones are added.

    `shared` is what all of them have in common; a folder of other ones is refused.
    """

    def __init__(self, out: Path, shared: Mapping[str, Any], wanted: Sequence[tuple[str, ...]]) -> None:
        self.out, self._shared = out, shared
        self._trials = {trial.overrides: trial for trial in _read_trials(out, shared)}
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
        content = {**self._shared, "trials": [asdict(trial) for trial in self.trials]}
        replace_file(self.out / SWEEP, f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode())

    def failure_reason(self, trial: Trial) -> str:
        """Why a run failed: what its status says, else the last line that it printed."""
        status = read_json(self.folder(trial) / "status.json")
        if isinstance(status, dict) and status.get("state") == "failed" and status.get("reason"):
            return str(status["reason"])
        try:
            lines = self.log(trial).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")

    def _refresh(self, trial: Trial) -> None:
        """Take the state from the run directory, where a user may have continued the run."""
        found = read_state(self.folder(trial))
        if found == "finished":
            trial.state, trial.exit_code, trial.reason = "finished", 0, None
        elif is_held(self.folder(trial) / LOCK):
            trial.state = "running"
        elif found == "failed" and trial.state != "failed":
            trial.state, trial.reason = "failed", self.failure_reason(trial)
        elif trial.state != "failed":
            trial.state = "stopped" if self.folder(trial).is_dir() else "waiting"


def _read_trials(out: Path, shared: Mapping[str, Any]) -> list[Trial]:
    """The trials in a sweep's folder, none if it is new; UsageError if the folder holds something else."""
    held = sorted(path.name for path in out.iterdir() if not is_partial(path.name)) if out.is_dir() else []
    found: Any = read_json(out / SWEEP, _MAX_BYTES)
    if set(held) <= {LOCK}:
        return []
    if not isinstance(found, dict) or "trials" not in found:
        raise UsageError(f"{out} is not the folder of a sweep: it holds {join_first(held, 5)}; choose one with --out")
    for key, value in shared.items():
        if found.get(key) != value:
            raise UsageError(
                f"{out} holds a sweep with other settings: {key} was {json.dumps(found.get(key))}, is"
                f" {json.dumps(value)}; choose another folder with --out"
            )
    try:
        return [Trial(**each | {"overrides": tuple(each["overrides"])}) for each in found["trials"]]
    except (TypeError, KeyError) as error:
        raise UsageError(f"{out / SWEEP}: was changed or damaged; remove it, or choose another --out") from error


def run_trials(
    file: SweepFile, due: Sequence[Trial], words: Callable[[Trial], list[str]], pool: JobPool, stop: StopRequest
) -> None:
    """Run these trials to their ends, as many at a time as the pool takes; on request, stop them all."""
    waiting, started = list(due), dict[str, tuple[Trial, float]]()
    (file.out / "logs").mkdir(exist_ok=True)
    with pool, progress_bar() as bar:
        task = bar.add_task("trials", total=len(file.wanted), completed=len(file.wanted) - len(due))

        def say(text: str) -> None:
            bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

        while pool.num_running or (waiting and not stop.requested):
            while waiting and pool.has_room and not stop.requested:
                trial = waiting.pop(0)
                say(f"{trial}: {'started' if trial.state == 'waiting' else 'resumed'}")
                trial.state, trial.exit_code, trial.reason = "running", None, None
                file.write()
                pool.start(trial.run, worker_command(words(trial)), file.log(trial))
                started[trial.run] = trial, time.monotonic()
            if stop.requested and not pool.is_stopping:
                say(f"stop     {pluralize(pool.num_running, 'run')} {stop}: waiting for them to save")
                pool.stop()
            time.sleep(_POLL_SECONDS)
            for name, code in pool.poll():
                trial, begin = started[name]
                _note_end(file, trial, code, pool.is_stopping)
                took = f"after {duration(time.monotonic() - begin)}"
                failed = f"failed with exit code {code} {took}; see {file.log(trial)}"
                say(f"{trial}: {failed if trial.state == 'failed' else f'{trial.state} {took}'}")
                bar.advance(task)


def _note_end(file: SweepFile, trial: Trial, code: int, is_stopping: bool) -> None:
    is_stopped = code == Stopped.exit_code or (is_stopping and code < 0)  # a request ends a process that just starts
    trial.exit_code, trial.state = code, "stopped" if is_stopped else "failed" if code else "finished"
    if trial.state == "failed":
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else None
        trial.reason = killed or file.failure_reason(trial)
    file.write()
