"""`metrics.jsonl`: one JSON object a line for every figure that a run logs or evaluates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.disk import replace_file
from paceline.core.errors import DataError
from paceline.observe.appending import GrowingFile
from paceline.observe.events import Evaluated, Event, Logged, Snapshot

Record = dict[str, Any]
"""One line of the file: "step", "epoch", "split", figures by name, and wall-clock figures under "clock"."""


def record_of(event: Logged | Evaluated) -> Record:
    """The record of an event; what is not finite becomes None, and the record's own keys win over figures."""
    own: Record
    if isinstance(event, Logged):
        own = {"smoothed": event.smoothed, "clock": event.clock}
        split = "train"
    else:
        own = {"num_samples": event.num_samples, "num_skipped": event.num_skipped, "clock": event.clock}
        split = event.split
    first: Record = {"step": event.step, "epoch": event.epoch, "split": split}
    figures = {name: value for name, value in event.figures.items() if name not in first}
    record: Record = _finite({**first, **figures, **own})
    return record


class MetricsFile:
    """Adds the record of every logged and evaluated event to the file, at once and whole."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)

    def handle(self, event: Event) -> None:
        """Write a line if the event has figures."""
        if isinstance(event, Logged | Evaluated):
            line = json.dumps(record_of(event), ensure_ascii=False, allow_nan=False)
            self._file.append(line.encode() + b"\n")

    def tick(self, snapshot: Snapshot) -> None:
        """Nothing to do between events."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(path: Path) -> list[Record]:
    """All records of the file, without a last line that was never finished; none if there is no file yet."""
    return [record for _, record in _read_lines(path)]


def truncate_after(path: Path, step: int) -> None:
    """Take out what was recorded after `step`, and a last line that was never finished; all or nothing.

    The test split is measured after the checkpoint of its step, so its record of `step` itself is taken out too.
    """
    if not path.exists():
        return
    kept = b"".join(line + b"\n" for line, record in _read_lines(path) if _is_covered(record, step))
    if kept == path.read_bytes():
        return
    replace_file(path, kept)


def _is_covered(record: Record, step: int) -> bool:
    last = step - 1 if record.get("split") == "test" else step
    return bool(record["step"] <= last)


def _read_lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    unfinished = len(lines)  # the last piece has no newline: empty, or torn
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            yield line, record
        elif number != unfinished:
            found = line[:60].decode(errors="replace")
            raise DataError(
                f"{path}:{number}: expected a JSON object with a step, got {found!r}; "
                "the file was changed or damaged: remove that line"
            )


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _finite(value: Any) -> Any:
    """JSON has no word for what is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
