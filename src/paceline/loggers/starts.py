"""`logs/starts.jsonl`: when, where and with what a run was started, resumed and ended."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.core.process import num_cores
from paceline.core.regular_file import open_regular
from paceline.loggers.events import Ended, Event, Logger, Started
from paceline.loggers.files import AppendFile

_PACKAGES = ("paceline", "torch", "torchvision", "timm", "numpy")
_MAX_BYTES = 1 << 22


class StartsFile(Logger):
    """Appends a line when the run starts or resumes, with `about` it, and one when it ends."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._file = AppendFile(path)
        self._about = about

    def handle(self, event: Event) -> None:
        """Write a line for a start or an end."""
        if isinstance(event, Started):
            place = {"device": event.device, "processes": event.world, "setup": event.lines}
            self._append({"step": event.resumed_step, **place, **self._about})
        elif isinstance(event, Ended):
            self._append({"step": event.step, "state": event.state, "reason": event.reason})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        content = json.dumps({"time": time.time(), **line}, ensure_ascii=False)
        self._file.append(content.encode(errors="backslashreplace") + b"\n")


def environment() -> dict[str, str | int]:
    """The machine, the versions and the command of this process."""
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": num_cores(),
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name))},
        "command": shlex.join(["paceline" if os.path.basename(sys.argv[0]) in _OURS else sys.argv[0], *sys.argv[1:]]),  # noqa: PTH119
    }


_OURS = ("paceline", "__main__.py")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The lines of the file, oldest first, without what is damaged; none if there is no file."""
    try:
        with open_regular(path) as file:
            lines = file.read(_MAX_BYTES).splitlines()
    except OSError:
        return []
    return [line for line in map(_parse, lines) if line is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line, parse_constant=lambda name: None)  # NaN is no JSON
    except (ValueError, RecursionError):
        return None
    is_line = isinstance(found, dict) and isinstance(found.get("time"), int | float) and type(found.get("step")) is int
    return found if is_line else None
