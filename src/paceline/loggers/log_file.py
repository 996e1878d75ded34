"""A log of everything that was said, with the time, and of details that the console leaves out."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from paceline.loggers.events import Event, Snapshot, Started
from paceline.loggers.jsonl import GrowingFile
from paceline.loggers.messages import lines_of, plain


class LogFile:
    """Appends a line for each event; a resumed run goes on in the same file."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._total_steps = 0

    def handle(self, event: Event) -> None:
        """Write what is to be said of the event."""
        if isinstance(event, Started):
            self._total_steps = event.total_steps
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        lines = [f"{now} {plain(words)}\n" for words in lines_of(event, self._total_steps)]
        if lines:
            self._file.append("".join(lines).encode(errors="backslashreplace"))

    def tick(self, snapshot: Snapshot) -> None:
        """Steps are not logged."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()
