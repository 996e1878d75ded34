"""Stopping on request: a signal is noted, and the run ends at the next step boundary with its state saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether somebody asked this process to stop. A second SIGINT is not waited for: it ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self.reason = ""

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take SIGINT, SIGTERM and SIGUSR1 as requests; elsewhere than in the main thread they are left alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.reason = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
