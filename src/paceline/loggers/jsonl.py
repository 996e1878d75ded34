"""`metrics.jsonl`: one JSON object per line for everything a run logs or evaluates."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from paceline.core.atomic_write import replace_file
from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular
from paceline.loggers.events import Evaluated, Event, Logged, Record
from paceline.loggers.files import AppendingLogger

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class JsonlLogger(AppendingLogger):
    """Appends a record for every logged and evaluated event, atomically."""

    def handle(self, event: Event) -> None:
        if isinstance(event, Logged | Evaluated):
            try:
                line = _encode(event.record)
            except ValueError:
                line = _encode(_finite(event.record))
            self._file.append(line.encode(errors="backslashreplace") + b"\n")  # as JSON escapes them


def _finite(value: Any) -> Any:
    """Replace values that are not finite, which JSON cannot express, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def read_records(path: Path) -> list[Record]:
    """All records of the file, without an incomplete last line; none if there is no file."""
    return list(iterate_records(path))


def iterate_records(path: Path) -> Iterator[Record]:
    """As `read_records`, one by one."""
    return (record for _, record in _parsed_lines(path))


_NOT_METRICS = {"step", "epoch", "split", "num_samples", "num_skipped", "clock", "smoothed"}


def metrics_of(record: Record) -> dict[str, float | None]:
    """The metrics of a record by name; None for values that are not finite."""
    return {name: value for name, value in record.items() if name not in _NOT_METRICS and _is_metric(value)}


def _is_metric(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def truncate_after(path: Path, step: int, pending: Collection[str] = ()) -> None:
    """Remove the records after `step` and an incomplete last line, atomically.

    At `step` itself, the splits in `pending` are removed too: they will be recorded again.
    """
    kept = b"".join(line for line, record in _parsed_lines(path) if _is_kept(record, step, pending))
    if path.exists() and path.stat().st_size != len(kept):
        replace_file(path, kept)


def _is_kept(record: Record, step: int, pending: Collection[str]) -> bool:
    return bool(record["step"] < step or (record["step"] == step and record.get("split") not in pending))


def _parsed_lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    """The complete lines with their records."""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                record = _parse(line)
                if record is None and not line.endswith(b"\n"):
                    return  # torn
                if record is None:
                    found = line.rstrip(b"\n")[:60].decode(errors="replace")
                    raise DataError(
                        f"{path}:{number}: expected a JSON object with a step, got {found!r}; "
                        "the file was changed or damaged: remove that line"
                    )
                yield line.removesuffix(b"\n") + b"\n", record
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; remove it, or restore the file") from error


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line, parse_int=_parse_int)
    except (ValueError, RecursionError):
        return None
    return record if _is_record(record) else None


def _parse_int(digits: str) -> int:
    """Parse an integer of at most 64 bits, as other readers do."""
    number = int(digits)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"expected at most 64 bits, got {number.bit_length()}")
    return number


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("split"), str):
        return False
    step, groups = value.get("step"), [value.get(name, {}) for name in ("smoothed", "clock")]
    return type(step) is int and step >= 0 and all(isinstance(group, dict) for group in groups)
