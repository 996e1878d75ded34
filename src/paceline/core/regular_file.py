"""Opens regular files only: a pipe would block until somebody writes to it, a device may be endless."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO


def open_regular(path: Path | bytes | str, buffering: int = -1, folder: int | None = None) -> BinaryIO:
    """The file, open for reading; anything but a regular file is an OSError that says what it is.

    `folder` is the descriptor of its folder, if that is open.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb", buffering)  # noqa: PTH123 - there is no path any more
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"{_kind(mode)}, not a file", os.fspath(path))


def first_file(paths: Sequence[Path]) -> Path | None:
    """The first path of a regular file, or else of anything, which opening it then refuses by name."""
    there = [path for path in paths if path.exists()]
    return next((path for path in there if path.is_file()), there[0] if there else None)


def why_no_file(path: Path) -> str:
    """Why a path is not a regular file."""
    try:
        return f"{_kind(path.stat().st_mode)}, not a file"
    except (OSError, ValueError):
        return "no such file"


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


_LONGEST = 1 << 16


def read_json(path: Path, most: int = _LONGEST) -> Any:
    """The content of a JSON file; None if it is not there, no regular file, damaged or longer than `most` bytes."""
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
        return json.loads(content) if len(content) <= most else None
    except (OSError, ValueError, RecursionError):
        return None
