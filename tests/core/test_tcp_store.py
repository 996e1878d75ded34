"""Where the store of a run's processes listens."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import timedelta
from errno import EADDRINUSE

import pytest

from paceline.core.errors import UsageError
from paceline.core.place import Place
from paceline.core.world import _listen_for_others, open_store, serve_store


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return int(trial.getsockname()[1])


@pytest.mark.parametrize(
    ("place", "address", "listens_at"),
    [
        (Place(0, 2, 0, 2, "127.0.0.1"), "127.0.0.1", "127.0.0.1"),
        (Place(0, 2, 0, 2, "localhost"), "127.0.0.1", "127.0.0.1"),
        # A machine that knows its own name as that of the loopback; an address that belongs to no machine here.
        (Place(0, 2, 0, 1, "localhost"), "127.0.0.1", "0.0.0.0"),
        (Place(0, 2, 0, 1, "192.0.2.1"), "192.0.2.1", "0.0.0.0"),
    ],
)
def test_it_listens_where_the_others_look_for_it(place: Place, address: str, listens_at: str) -> None:
    with _listen_for_others(replace(place, port=free_port()), address) as listener:
        found = listener.getsockname()[0]
    assert found.replace("::1", "127.0.0.1") == listens_at


def test_an_address_that_is_taken_is_not_shared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match=str(EADDRINUSE)):
        serve_store("127.0.0.1", taken.getsockname()[1], timedelta(seconds=5))


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR=no such host"):
        open_store(Place(1, 2, 1, 2, "no such host"), timedelta(seconds=5))
