"""`report.html` in a run directory, written while the run trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic

from paceline.core.atomic_write import replace_file
from paceline.loggers.events import Ended, Event, Logger, Started
from paceline.report.page import Report

_MOST_TIME = 0.01  # the share of the run that writing reports may take


class ReportFile(Logger):
    """Writes the report at the start and the end of a run, and in between as often as its share of the time allows.

    It reads what the other sinks wrote, so it comes after them. A report that cannot be written is one warning.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._report: Report | None = None
        self._has_warned = False
        self._next_write = 0.0

    def handle(self, event: Event) -> None:
        """Write the report if one is due."""
        started, problem = monotonic(), None
        if started < self._next_write and not isinstance(event, Started | Ended):
            return
        try:
            self._report = self._report or Report([self._folder])
            replace_file(self._folder / "report.html", self._report.render(), is_durable=False)
        except Exception as error:  # noqa: BLE001 - no report is worth a run
            problem = f"{type(error).__name__}: {error}"
        self._next_write = monotonic() + (monotonic() - started) / _MOST_TIME
        if problem is not None and not self._has_warned:
            self._has_warned = True
            hint = f"training continues; write it later with: paceline report {self._folder}"
            self._warn(f"cannot write {self._folder / 'report.html'}: {problem}; {hint}")
