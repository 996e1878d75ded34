"""Run the trials of a sweep on this machine, each by `paceline train` in a process of its own, with progress."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.commands.common import progress_bar
from paceline.commands.sweep_file import SweepFile, Trial, failure_reason
from paceline.core.errors import Stopped
from paceline.core.process import StopRequest
from paceline.core.regular_file import read_json
from paceline.core.text import format_metric, pluralize
from paceline.launch.job_pool import Job, JobPool
from paceline.launch.launcher import worker_command
from paceline.loggers.messages import duration
from paceline.loggers.results import About, read_main_metric, read_results

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_POLL_SECONDS = 0.1


def run_trials(
    file: SweepFile, due: Sequence[Trial], words: Callable[[Trial], list[str]], pool: JobPool, stop: StopRequest
) -> None:
    """Run these trials to their ends, as many at a time as the pool takes; on request, stop them all."""
    waiting = list(due)
    (file.out / "logs").mkdir(exist_ok=True)
    with pool, progress_bar() as bar:
        progress = _Progress(bar, file)
        while pool.jobs or (waiting and not stop.requested):
            while waiting and pool.has_room and not stop.requested:
                trial = waiting.pop(0)
                progress.start(trial)
                trial.state, trial.exit_code, trial.reason = "running", None, None
                file.write()
                pool.start(Job(trial.run, worker_command(words(trial)), file.log(trial)))
            if stop.requested and not pool.is_stopping:
                pool.stop()
                progress.stop(stop)
            time.sleep(_POLL_SECONDS)
            for job, code in pool.poll():
                trial = next(each for each in due if each.run == job.name)
                _note_end(file, trial, code, pool.is_stopping)
                progress.end(trial)
            progress.update()


def _note_end(file: SweepFile, trial: Trial, code: int, is_stopping: bool) -> None:
    is_stopped = code == Stopped.exit_code or (is_stopping and code < 0)  # a request ends a process that just starts
    trial.exit_code, trial.state = code, "stopped" if is_stopped else "failed" if code else "finished"
    if trial.state == "failed":
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else None
        trial.reason = killed or failure_reason(file.folder(trial), file.log(trial))
    file.write()


class _Progress:
    """A bar for each trial that runs and one for all; without a terminal, a line for each start and end."""

    def __init__(self, bar: Progress, file: SweepFile) -> None:
        self._bar, self._file = bar, file
        self._all = bar.add_task("trials", total=len(file.wanted), completed=self._num_finished())
        self._running: dict[str, tuple[Trial, TaskID, float]] = {}

    def start(self, trial: Trial) -> None:
        """A trial starts, or resumes from where it stopped."""
        is_new = trial.state == "waiting"
        self._print(f"{trial}: {'started' if is_new else 'resumed'}")
        self._running[trial.run] = trial, self._bar.add_task(str(trial), total=None), time.monotonic()

    def stop(self, request: StopRequest) -> None:
        """All trials were asked to stop."""
        self._print(f"stop     {pluralize(len(self._running), 'run')} {request}: waiting for them to save")

    def update(self) -> None:
        """Show how far the trials are that run."""
        for trial, task, _ in self._running.values():
            status = read_json(self._file.folder(trial) / "status.json")
            if isinstance(status, dict) and isinstance(status.get("step"), int):
                self._bar.update(task, completed=status["step"], total=status.get("total_steps"))
        self._bar.update(self._all, completed=self._num_finished())

    def end(self, trial: Trial) -> None:
        """A trial has ended."""
        _, task, started = self._running.pop(trial.run)
        self._bar.remove_task(task)
        seconds = duration(time.monotonic() - started)
        if trial.state == "failed":
            log = self._file.log(trial)
            self._print(f"{trial}: failed with exit code {trial.exit_code} after {seconds}; see {log}")
        else:
            self._print(f"{trial}: {trial.state} after {seconds}{main_metric(self._file, trial)}")

    def _num_finished(self) -> int:
        return sum(trial.state == "finished" for trial in self._file.wanted)

    def _print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


def main_metric(file: SweepFile, trial: Trial) -> str:
    """The last value of the metric that a run is judged by, as ", top1 0.8500"; empty if there is none."""
    folder = file.folder(trial)
    main = read_main_metric(folder)
    for result in read_results(folder, About("", "", "")) if main else ():
        value = result.metrics.get(main[0]) if main else None
        if value is not None and main:
            return f", {result.split} {main[0]} {format_metric(value)}"
    return ""
