"""`status.json`, `logs/rank-N.log`, and atomic appends."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from time import monotonic

from paceline.core.atomic_write import replace_file
from paceline.loggers.events import Ended, Evaluated, Event, Logged, Logger, Started
from paceline.loggers.messages import lines_of, plain

_SECONDS_BETWEEN_STEPS = 1.0


class AppendFile:
    """Appends each piece completely or not at all; creates the file and its folder on first use.

    A piece that could not be written is kept and written before the next one. The `OSError` names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._unwritten = b""

    def append(self, piece: bytes) -> None:
        """Append `piece` after all unwritten ones; on return the system has it."""
        self._unwritten += piece
        try:
            if self._descriptor is None:
                self._descriptor = _open(self.path)
            _write_whole(self._descriptor, self._unwritten)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._unwritten = b""

    def close(self) -> None:
        """Write what is left and close the file; appending opens it again."""
        try:
            if self._unwritten:
                self.append(b"")
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A planted link is not followed, and a pipe that nobody reads not waited for.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o666)


def _write_whole(descriptor: int, data: bytes) -> None:
    size = os.fstat(descriptor).st_size
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        if written:
            os.ftruncate(descriptor, size)
        raise


class LogFile(Logger):
    """Appends a line for each event; a resumed run continues the same file."""

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)
        self._total_steps = 0

    def handle(self, event: Event) -> None:
        """Write the lines of an event."""
        if isinstance(event, Started):
            self._total_steps = event.total_steps
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        lines = [f"{now} {plain(words)}\n" for words in lines_of(event, self._total_steps)]
        if lines:
            self._file.append("".join(lines).encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StatusFile(Logger):
    """Writes the state of the run; the file is replaced atomically."""

    def __init__(self, path: Path, total_steps: int) -> None:
        self.path = path
        self.total_steps = total_steps
        self._best: dict[str, str] = {}
        self._next_write = 0.0

    def handle(self, event: Event) -> None:
        """Update the state after an event."""
        if isinstance(event, Started):
            if event.main_metric is not None:
                self._best = {"main_metric": event.main_metric, "direction": event.direction}
            self._write("running", event.resumed_step, event.resumed_step / event.steps_per_epoch, None)
        elif isinstance(event, Evaluated) or (isinstance(event, Logged) and monotonic() >= self._next_write):
            self._write("running", event.step, event.epoch, None)
        elif isinstance(event, Ended):
            self._write(event.state, event.step, event.epoch, event.reason)

    def _write(self, state: str, step: int, epoch: float, reason: str | None) -> None:
        status = {
            "state": state,
            "step": step,
            "total_steps": self.total_steps,
            "epoch": epoch,
            "reason": reason,
            **self._best,
        }
        replace_file(self.path, f"{json.dumps({**status, 'pid': os.getpid()})}\n".encode(), is_durable=False)
        self._next_write = monotonic() + _SECONDS_BETWEEN_STEPS
