"""`status.json`: what a run is doing, for scripts and for people."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import monotonic

from paceline.core.atomic_write import replace_file
from paceline.loggers.events import Ended, Evaluated, Event, Logged, Snapshot, Started

_SECONDS_BETWEEN_STEPS = 1.0


class StatusFile:
    """Keeps the file up to date; it is replaced as a whole, so that readers never see half of it."""

    def __init__(self, path: Path, total_steps: int) -> None:
        self.path = path
        self.total_steps = total_steps
        self._next_write = 0.0

    def handle(self, event: Event) -> None:
        """Write what the event says about the state of the run."""
        if isinstance(event, Started):
            self._write("running", event.resumed_step, event.resumed_step / event.steps_per_epoch, None)
        elif isinstance(event, Evaluated) or (isinstance(event, Logged) and monotonic() >= self._next_write):
            self._write("running", event.step, event.epoch, None)
        elif isinstance(event, Ended):
            self._write(event.state, event.step, event.epoch, event.reason)

    def tick(self, snapshot: Snapshot) -> None:
        """Nothing: the file follows events, not steps."""

    def close(self) -> None:
        """Nothing is kept open."""

    def _write(self, state: str, step: int, epoch: float, reason: str | None) -> None:
        status = {
            "state": state,
            "step": step,
            "total_steps": self.total_steps,
            "epoch": epoch,
            "reason": reason,
        }
        replace_file(self.path, f"{json.dumps({**status, 'pid': os.getpid()})}\n".encode(), is_durable=False)
        self._next_write = monotonic() + _SECONDS_BETWEEN_STEPS
