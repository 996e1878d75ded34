"""The signals that ask a run to stop: from a terminal, a scheduler, systemd or `timeout`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def handled(handler: Handler, until_exit: bool = False) -> Iterator[None]:
    """Have `handler` answer the stop signals inside; one that is ignored, as SIGHUP under nohup, stays ignored.

    With `until_exit` all but SIGINT are ignored afterwards: the process is about to end, and a repeated request must
    not change its exit code.
    """
    wanted = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, signal.SIG_IGN if until_exit and number != signal.SIGINT else before)


@contextmanager
def blocked() -> Iterator[None]:
    """Hold the stop signals back inside; threads and processes that are started inside never receive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
