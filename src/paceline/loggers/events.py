"""The events of a run, and the loggers that show or record them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class Started:
    """A run starts, or resumes after `resumed_step`; `lines` describe its setup."""

    name: str
    out: Path
    device: str
    world: int
    total_steps: int
    steps_per_epoch: int
    resumed_step: int = 0
    lines: list[str] = field(default_factory=list)
    main_metric: str | None = None
    """The metric that the best checkpoint is kept by."""
    direction: Literal["max", "min"] = "max"


Record = dict[str, Any]
"""A line of metrics.jsonl: "step", "epoch", "split", metrics by name, and wall-clock metrics under "clock".

The file has null for values that are not finite.
"""


@dataclass(frozen=True)
class Logged:
    """Metrics of training at a step: latest values, windows in `smoothed`, wall-clock metrics in `clock`."""

    step: int
    epoch: float
    metrics: dict[str, float]
    smoothed: dict[str, dict[str, float]] = field(default_factory=dict)
    clock: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def record(self) -> Record:
        return _record(self, "train", smoothed=self.smoothed)


@dataclass(frozen=True)
class Evaluated:
    """Metrics of a whole split at a step."""

    step: int
    epoch: float
    split: str
    metrics: dict[str, float]
    num_samples: int
    num_skipped: int = 0
    clock: dict[str, Any] = field(default_factory=dict)
    confusion: list[list[int]] | None = None

    @cached_property
    def record(self) -> Record:
        return _record(self, self.split, num_samples=self.num_samples, num_skipped=self.num_skipped)


def _record(event: Logged | Evaluated, split: str, **own: Any) -> Record:
    """The record of an event; its own keys win over metrics."""
    first = {"step": event.step, "epoch": event.epoch, "split": split}
    metrics = {name: value for name, value in event.metrics.items() if name not in first}
    return {**first, **metrics, **own, "clock": event.clock}


@dataclass(frozen=True)
class Visualized:
    """Images of a split at a step were written as PNG files, by name."""

    step: int
    split: str
    images: dict[str, Path]


@dataclass(frozen=True)
class Saved:
    """A checkpoint was committed."""

    step: int
    path: Path
    is_best: bool = False


@dataclass(frozen=True)
class Note:
    """A message for the user; details go to the log file only."""

    text: str
    level: Literal["detail", "info", "warning"] = "info"


@dataclass(frozen=True)
class Ended:
    """The run is over: "finished", "stopped" or "failed"; `lines` are the summary."""

    state: str
    step: int
    epoch: float
    lines: list[str] = field(default_factory=list)
    reason: str | None = None
    """Why the run ended early; the command or its launcher prints this last."""
    is_reported: bool = False
    """Whether the launcher, which knows more, reports the error."""


SECONDS_BETWEEN_FLUSHES = 0.5

Event = Started | Logged | Evaluated | Visualized | Saved | Note | Ended


class EvaluationProgress(NamedTuple):
    """How many of its batches an evaluation has measured."""

    split: str
    done: int
    total: int


class Snapshot(NamedTuple):
    """How far the run is, at every step, and in an evaluation at every batch.

    `data_wait` is the share of time spent waiting for data.
    """

    step: int
    total_steps: int
    epoch: float
    data_wait: float
    evaluation: EvaluationProgress | None = None


class Logger:
    """Shows or records events; by default it ignores them."""

    def handle(self, event: Event) -> None:
        """Show or record one event; other kinds are ignored."""

    def tick(self, snapshot: Snapshot) -> None:
        """Receive the progress; called at every step, so it must be cheap."""

    def close(self) -> None:
        """Finish writing; called once, at the end."""


class LoggerGroup:
    """Forwards events to all sinks; has none on ranks other than 0.

    A sink that cannot write (a full disk, a closed terminal) does not stop training: the others report it
    once, and it still gets the next events.
    """

    def __init__(self, sinks: Iterable[Logger] = ()) -> None:
        self._sinks = list(sinks)
        self._tick_sinks = [sink for sink in self._sinks if type(sink).tick is not Logger.tick]
        self._failed: list[Logger] = []
        self._waiting: list[Event] = []
        self._next_flush = 0.0

    def emit(self, event: Event) -> None:
        """Forward `event` to every sink; frequent events are buffered for a moment."""
        self._waiting.append(event)
        can_wait = isinstance(event, Logged) or (isinstance(event, Note) and event.level == "detail")
        if not can_wait or monotonic() >= self._next_flush:
            self.flush()

    def flush(self) -> None:
        """Forward buffered events; many at once are much cheaper than one by one."""
        events, self._waiting = self._waiting, []
        self._next_flush = monotonic() + SECONDS_BETWEEN_FLUSHES
        for sink in self._sinks:
            for event in events:
                self._call(sink, sink.handle, event)

    def tick(self, snapshot: Snapshot) -> None:
        """Forward the progress to every sink that wants it."""
        if self._waiting and monotonic() >= self._next_flush:
            self.flush()
        for sink in self._tick_sinks:
            self._call(sink, sink.tick, snapshot)

    def close(self) -> None:
        self.flush()
        for sink in self._sinks:
            self._call(sink, sink.close)

    def _call(self, sink: Logger, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
        except OSError as error:
            if sink in self._failed:
                return
            self._failed.append(sink)
            where = error.filename or type(sink).__name__
            note = Note(f"cannot write to {where}: {error.strerror or error}; training continues", "warning")
            for other in self._sinks:
                if other is not sink:
                    self._call(other, other.handle, note)
