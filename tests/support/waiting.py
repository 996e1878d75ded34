"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT = 180.0  # far more than anything takes on a machine that is busy with other things


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds; fail if it never does."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    """Whether a process exists that has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
