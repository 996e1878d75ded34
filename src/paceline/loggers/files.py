"""Files of a run directory: its state, its logs, its starts and tables by class; and atomic appends."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import Any

from paceline.core.atomic_write import replace_file, write_all
from paceline.core.process import num_cores
from paceline.core.regular_file import open_regular, read_json
from paceline.core.text import as_cell
from paceline.loggers.events import Ended, Evaluated, Event, Logged, Logger, Started
from paceline.loggers.messages import lines_of

_SECONDS_BETWEEN_STEPS = 1.0
_PACKAGES = ("paceline", "torch", "torchvision", "timm", "numpy")
_MAX_STARTS_BYTES = 1 << 22
_MAX_CLASSES = 100  # more are only drawn: nobody reads a table of ten thousand cells
_MAX_TABLE_BYTES = 1 << 20
_CONFUSION = "-confusion.json"


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
    try:
        write_all(descriptor, data)
    except OSError:
        with suppress(OSError):  # a device has no size
            os.ftruncate(descriptor, size)
        raise


class AppendingLogger(Logger):
    """Appends to a file; a resumed run continues the same file."""

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)

    def close(self) -> None:
        self._file.close()


class LogFile(AppendingLogger):
    """Appends a line for each event to `logs/rank-N.log`."""

    _total_steps = 0

    def handle(self, event: Event) -> None:
        if isinstance(event, Started):
            self._total_steps = event.total_steps
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        lines = [f"{now} {line}\n" for line in lines_of(event, self._total_steps)]
        if lines:
            self._file.append("".join(lines).encode(errors="backslashreplace"))


class StatusFile(Logger):
    """Writes the state of the run to `status.json`; the file is replaced atomically."""

    def __init__(self, path: Path, total_steps: int) -> None:
        self.path = path
        self.total_steps = total_steps
        self._best: dict[str, str] = {}
        self._next_write = 0.0

    def handle(self, event: Event) -> None:
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


class StartsFile(AppendingLogger):
    """Appends a line to `logs/starts.jsonl` when the run starts or resumes, with `about` it, and when it ends."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._about = about

    def handle(self, event: Event) -> None:
        if isinstance(event, Started):
            place = {"device": event.device, "processes": event.world, "setup": event.lines}
            self._append({"step": event.resumed_step, **place, **self._about})
        elif isinstance(event, Ended):
            self._append({"step": event.step, "state": event.state, "reason": event.reason})

    def _append(self, line: dict[str, Any]) -> None:
        content = json.dumps({"time": time.time(), **line}, ensure_ascii=False)
        self._file.append(content.encode(errors="backslashreplace") + b"\n")


def environment() -> dict[str, str | int]:
    """The machine, the versions and the command of this process."""
    program = "paceline" if os.path.basename(sys.argv[0]) in ("paceline", "__main__.py") else sys.argv[0]  # noqa: PTH119
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": num_cores(),
        "python": platform.python_version(),
        **_versions(),
        "command": shlex.join([program, *sys.argv[1:]]),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The lines of `logs/starts.jsonl`, oldest first, without what is damaged; none if there is no file."""
    try:
        with open_regular(path) as file:
            lines = file.read(_MAX_STARTS_BYTES).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line, parse_constant=lambda name: None))  # NaN is no JSON
    return [each for each in found if isinstance(each, dict) and _is_start(each)]


def _is_start(line: dict[str, Any]) -> bool:
    return isinstance(line.get("time"), int | float) and type(line.get("step")) is int


class ConfusionFile(Logger):
    """Writes the last confusion matrix of each split to `SPLIT-confusion.json`: rows are true classes."""

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self._folder = folder
        self._classes = list(classes)

    def handle(self, event: Event) -> None:
        if not isinstance(event, Evaluated) or event.confusion is None or len(event.confusion) > _MAX_CLASSES:
            return
        self._folder.mkdir(exist_ok=True)
        table = {"step": event.step, "classes": self._classes, "counts": event.confusion}
        content = json.dumps(table, ensure_ascii=False).encode(errors="backslashreplace")
        replace_file(self._folder / f"{event.split}{_CONFUSION}", content, is_durable=False)


class ClassTable(Logger):
    """Writes the last metrics of single classes of each split to `SPLIT-per_class.csv`: a class a row."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def handle(self, event: Event) -> None:
        if not isinstance(event, Evaluated):
            return
        rows: dict[str, dict[str, float]] = {}
        for name, value in event.metrics.items():
            metric, dot, of_class = name.partition(".")
            if dot:
                rows.setdefault(of_class, {})[metric] = value
        if not rows:
            return
        text, metrics = io.StringIO(), dict.fromkeys(metric for row in rows.values() for metric in row)
        table = csv.DictWriter(text, ["class", *metrics], lineterminator="\n")
        table.writeheader()
        table.writerows({"class": as_cell(name), **row} for name, row in rows.items())
        self._folder.mkdir(exist_ok=True)
        content = text.getvalue().encode(errors="backslashreplace")
        replace_file(self._folder / f"{event.split}-per_class.csv", content, is_durable=False)


def read_confusion(folder: Path) -> dict[str, dict[str, Any]]:
    """The confusion matrices of a run by split: "step", "classes" and "counts"; without damaged files."""
    tables = {path.name: read_json(path, _MAX_TABLE_BYTES) for path in sorted(folder.glob(f"*{_CONFUSION}"))}
    return {name.removesuffix(_CONFUSION): table for name, table in tables.items() if _is_confusion(table)}


def _is_confusion(table: Any) -> bool:
    if not isinstance(table, dict) or type(table.get("step")) is not int:
        return False
    classes, counts = table.get("classes"), table.get("counts")
    if not isinstance(classes, list) or not isinstance(counts, list) or len(classes) != len(counts):
        return False
    is_square = all(isinstance(row, list) and len(row) == len(classes) for row in counts)
    return is_square and all(type(count) is int for row in counts for count in row)
