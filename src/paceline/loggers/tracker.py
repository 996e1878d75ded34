"""Experiment trackers: a thread passes them the metrics, so that neither a slow nor a broken one disturbs training."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from paceline.core.atomic_write import replace_file
from paceline.core.regular_file import read_json
from paceline.loggers.events import Ended, Evaluated, Event, Logged, Logger, Record, Snapshot, Started, Visualized
from paceline.loggers.tensorboard import scalars_of

_END_SECONDS = 60.0  # for what is left to be sent when the run is over


_ids_lock = threading.Lock()


class Tracker(Protocol):
    """What a tracking service is called for, always from one thread."""

    def start(self, name: str) -> None:
        """Open the tracker's run, or continue it."""

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log metrics by name; those of a resumed run that the service has already are repeated."""

    def log_images(self, step: int, images: dict[str, Path]) -> None:
        """Log PNG files by name."""

    def end(self, state: str) -> None:
        """Close the run, which is "finished", "stopped" or "failed"."""


class TrackerLogger(Logger):
    """Passes metrics and images to a tracker; whatever it raises is one warning, and training continues.

    A resumed run first passes on its earlier `records`: some were lost with the process that was killed.
    """

    def __init__(
        self, name: str, tracker: Tracker, warn: Callable[[str], None], records: Sequence[Record] = ()
    ) -> None:
        self._name, self._tracker, self._warn, self._records = name, tracker, warn, records
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._problem: str | None = None
        self._is_reported = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)

    def handle(self, event: Event) -> None:
        """Pass an event on; at the end of the run, wait until the tracker has everything."""
        if isinstance(event, Started):
            self._thread.start()
        if isinstance(event, Started | Logged | Evaluated | Visualized | Ended):
            self._events.put(event)
        if isinstance(event, Ended):
            self.close()
        self._report()

    def tick(self, snapshot: Snapshot) -> None:
        """Report what went wrong since, from the thread that may print."""
        self._report()

    def close(self) -> None:
        """End the thread; it is left behind if the tracker does not answer."""
        self._events.put(None)
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
            if self._thread.is_alive():
                self._problem = self._problem or f"does not answer for {_END_SECONDS:.0f} s"

    def _report(self) -> None:
        if self._problem and not self._is_reported:
            self._is_reported = True
            self._warn(f"logging.{self._name}: {self._problem}; training continues, and metrics.jsonl has everything")

    def _work(self) -> None:
        is_open = True
        while (event := self._events.get()) is not None:
            try:
                if is_open:
                    self._pass_on(event)
            except Exception as error:  # noqa: BLE001 - a service may raise anything
                first = next(iter(str(error).splitlines()), "")
                self._problem = self._problem or f"{type(error).__name__}: {first}"
                is_open = not isinstance(event, Started)

    def _pass_on(self, event: Event) -> None:
        match event:
            case Started():
                self._tracker.start(event.name)
                for record in self._records:
                    self._log(record)
                self._records = ()
            case Logged() | Evaluated():
                self._log(event.record)
            case Visualized():
                self._tracker.log_images(
                    event.step, {f"{event.split}/{name}": path for name, path in event.images.items()}
                )
            case Ended():
                self._tracker.end(event.state)

    def _log(self, record: Record) -> None:
        epoch = {"train/epoch": float(record["epoch"])} if record["split"] == "train" else {}
        self._tracker.log(record["step"], dict(scalars_of(record)) | epoch)


class TrackerIds:
    """`trackers.json` of a run directory: the id that each tracker knows the run by, so that resuming continues it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "trackers.json"

    def read(self, tracker: str) -> str | None:
        """The id of this run; None if the tracker does not know it yet."""
        known = self._all().get(tracker)
        return known if isinstance(known, str) else None

    def write(self, tracker: str, number: str) -> None:
        """Keep the id of this run."""
        with _ids_lock:  # each tracker has its own thread
            replace_file(self._path, f"{json.dumps(self._all() | {tracker: number})}\n".encode())

    def _all(self) -> dict[str, Any]:
        found = read_json(self._path)
        return found if isinstance(found, dict) else {}
