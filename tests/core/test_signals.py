"""Stop signals: who answers them, and for how long."""

import os
import signal
from collections.abc import Iterator

import pytest

from paceline.core.process import STOP_SIGNALS, block_stop_signals, handle_stop_signals


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_are_answered_inside_and_ignored_ones_stay_ignored() -> None:
    """As SIGHUP is under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    heard: list[int] = []
    with handle_stop_signals(lambda number, frame: heard.append(number)):
        for number in STOP_SIGNALS:
            signal.raise_signal(number)
    assert heard == [number for number in STOP_SIGNALS if number != signal.SIGHUP]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_process_that_is_about_to_end_ignores_what_comes_too_late() -> None:
    before = signal.getsignal(signal.SIGINT)
    with handle_stop_signals(lambda number, frame: None, until_exit=True):
        pass
    ignored = [signal.SIG_IGN] * (len(STOP_SIGNALS) - 1)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == [before, *ignored]


def test_a_process_that_is_started_while_they_are_blocked_never_receives_them() -> None:
    with block_stop_signals():
        child = os.fork()
        if child == 0:
            for number in STOP_SIGNALS:
                os.kill(os.getpid(), number)
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOP_SIGNALS) == set()
