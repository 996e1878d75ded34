"""Stop signals of the launcher: recorded, and handled when it next polls."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.core.process import handle_stop_signals


class Interrupted(BaseException):
    """A request to stop came while no process was there to save anything, or had to be obeyed at once.

    No Exception: libraries catch those, in the middle of their imports too.
    """


class StopSignals:
    """The first signal that asked this launcher to stop; `at_once` after a second SIGINT."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.at_once = False
        self.is_waiting = True  # nothing is lost if the launcher is interrupted where it stands
        self._interrupts = 0

    @property
    def to_forward(self) -> signal.Signals:
        """What to send to the processes: they know nothing of a terminal.

        Some schedulers send SIGINT to every process of a job. One more from us would be the second, which ends at once.
        """
        return signal.SIGTERM if self.received in (None, signal.SIGHUP, signal.SIGINT) else self.received

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the stop signals as requests; the launcher's process ends behind it, so no request comes too late."""
        with handle_stop_signals(self._note, until_exit=True):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Be interrupted by the first request, here or before."""
        self.is_waiting = True  # first: a request between these two lines would be seen by neither
        if self.received:
            raise Interrupted
        yield
        self.is_waiting = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        self.received = self.received or signal.Signals(number)
        self._interrupts += number == signal.SIGINT
        self.at_once = self._interrupts > 1
        if (is_first and self.is_waiting) or (number == signal.SIGINT and self._interrupts == 2):
            raise Interrupted
