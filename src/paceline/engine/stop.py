"""Stopping on request: a signal is noted, and the run ends at the next step boundary with its state saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.core.errors import Stopped
from paceline.core.signals import handled


class StopRequest:
    """Whether somebody asked this process to stop. A second SIGINT is not waited for: it ends the process at once."""

    def __init__(self, is_starting: bool = False) -> None:
        self.requested = False
        self.reason = ""
        self.is_starting = is_starting
        """Whether there is nothing to save yet, so that a request ends the process where it stands."""

    def __str__(self) -> str:
        return f"on request ({self.reason})" if self.reason else "on request"

    @contextmanager
    def on_signals(self, until_exit: bool = False) -> Iterator[None]:
        """Take the stop signals as requests; elsewhere than in the main thread they are left alone.

        `until_exit`: see `handled`.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handled(self._note, until_exit):
            yield

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.is_starting and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.is_starting:
            raise Stopped(f"stopped by {name} before training began; the same command begins again")
        self.requested = True
        self.reason = name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
