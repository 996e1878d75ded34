"""`report.html` in a run directory, written while the run trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from paceline.core.atomic_write import replace_file
from paceline.loggers.events import Ended, Evaluated, Event, Logged, Logger, Started, Visualized
from paceline.report.page import Report

_SECONDS_AFTER_EVENT = 0.3  # the images of an evaluation come a moment behind its metrics
_SECONDS_TO_FIRST_LOG = 5.0  # many runs are over by then, or were evaluated
_SECONDS_BETWEEN_LOGS = 30.0
_MOST_TIME = 0.01  # the share of the run that writing reports may take


class ReportFile(Logger):
    """Writes the report at the start and the end of a run, and at evaluations in a thread of its own.

    It reads what the other sinks wrote, so it comes after them. A report that cannot be written is one warning.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._report: Report | None = None
        self._problem: str | None = None
        self._has_warned = False
        self._is_due, self._has_ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._next_log = 0.0
        self._next_write = 0.0

    def handle(self, event: Event) -> None:
        """Write the report, or have the thread write it."""
        if isinstance(event, Started | Ended):
            self.close()
            self._write()
            self._next_log = monotonic() + _SECONDS_TO_FIRST_LOG
        elif isinstance(event, Logged | Evaluated | Visualized) and self._is_report_due(event):
            self._next_log = monotonic() + _SECONDS_BETWEEN_LOGS
            self._is_due.set()
            if self._thread is None:
                self._has_ended.clear()
                self._thread = threading.Thread(target=self._write_when_due, name="report", daemon=True)
                self._thread.start()
        self._report_problem()

    def _is_report_due(self, event: Logged | Evaluated | Visualized) -> bool:
        """Evaluations and their images have a report at once; training and its samples wait for the next."""
        is_training = isinstance(event, Logged) or event.split == "train"
        return not is_training or monotonic() > self._next_log

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._has_ended.set()
            self._is_due.set()
            self._thread.join()
            self._thread = None

    def _write_when_due(self) -> None:
        while True:
            self._is_due.wait()
            if self._has_ended.wait(max(_SECONDS_AFTER_EVENT, self._next_write - monotonic())):
                return
            self._is_due.clear()
            self._write()

    def _write(self) -> None:
        started = monotonic()
        try:
            if self._report is None:
                self._report = Report([self._folder])
            replace_file(self._folder / "report.html", self._report.render(), is_durable=False)
        except Exception as error:  # noqa: BLE001 - no report is worth a run
            self._problem = f"{type(error).__name__}: {error}"
        self._next_write = monotonic() + (monotonic() - started) / _MOST_TIME

    def _report_problem(self) -> None:
        if self._problem is not None and not self._has_warned:
            self._has_warned = True
            hint = f"training continues; write it later with: paceline report {self._folder}"
            self._warn(f"cannot write {self._folder / 'report.html'}: {self._problem}; {hint}")
