"""Requests to stop while a run is still being set up, wherever they come."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from paceline.core.errors import Stopped
from paceline.core.process import STOP_SIGNALS, StopRequest
from paceline.launch.supervisor import Interrupted, StopSignals


def raise_in_library(*numbers: signal.Signals) -> None:
    """As in an import whose failure a library takes for a missing package."""
    with suppress(Exception):
        for number in numbers:
            signal.raise_signal(number)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Stopped), (signal.SIGHUP, Stopped), (signal.SIGINT, KeyboardInterrupt)]
)
def test_no_library_keeps_a_request_from_stopping_a_start(number: signal.Signals, error: type[BaseException]) -> None:
    with pytest.raises(error) as caught, StopRequest(is_starting=True).on_signals():
        raise_in_library(number)
    assert error is KeyboardInterrupt or number.name in str(caught.value)


def test_repeated_requests_do_not_disturb_what_the_first_one_ends() -> None:
    stop = StopRequest(is_starting=True)
    tidied = []

    def start() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            tidied.append(True)

    with pytest.raises(Stopped), stop.on_signals():
        start()
    assert (tidied, stop.requested) == ([True], True)


def test_the_launcher_is_interrupted_too() -> None:
    stop = StopSignals()
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        with pytest.raises(Interrupted), stop.installed():
            raise_in_library(signal.SIGTERM)
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, before[number])
