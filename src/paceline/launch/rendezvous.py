"""Where the launchers of a run's machines find each other. On one machine there is nobody to find."""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from datetime import timedelta

from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.utils.distributed import get_free_port

from paceline.core.errors import PacelineError, UsageError
from paceline.core.place import HERE
from paceline.core.world import serve_store
from paceline.launch.machines import Machines, OneMachine, SeveralMachines
from paceline.launch.membership import JsonBackend
from paceline.launch.network import Endpoint, address_towards, can_connect, is_loopback

_NAME = "paceline"
# Once enough machines have come, others are waited for this long; later ones join a running run.
_LAST_CALL_SECONDS = 3
# A machine that was not heard of for the product of these is lost.
_HEARTBEAT_SECONDS, _HEARTBEATS_MISSED = 2, 5
_SECONDS_BETWEEN_TRIES = 0.5


class Alone(RendezvousHandler):
    """A meeting of one: no server, no waiting; every round has a port of its own for the processes."""

    def get_backend(self) -> str:
        """A name, for logs."""
        return "one machine"

    def next_rendezvous(self) -> RendezvousInfo:
        """A world of one machine."""
        port: int = get_free_port()  # type: ignore[no-untyped-call]
        store = dist.HashStore()  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(HERE, port))

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nobody needs to be told."""

    def num_nodes_waiting(self) -> int:
        """Nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """A name, for logs."""
        return _NAME

    def shutdown(self) -> bool:
        """Nothing is open."""
        return True


def meet(endpoint: Endpoint | None, min_nodes: int, max_nodes: int, timeout: float) -> Machines:
    """The machines of a run; several are in touch within `timeout` seconds, or an error says so."""
    if endpoint is None:
        return OneMachine(Alone())
    address = address_towards(endpoint)
    if max_nodes > 1 and is_loopback(address) and not is_loopback(endpoint.host):
        raise UsageError(
            f"--rendezvous {endpoint}: this machine knows that name as {address}, which no other machine can reach;"
            f" use an address that all can reach, as in --rendezvous 10.0.0.1:{endpoint.port}"
        )
    parameters = RendezvousParameters(
        "c10d",
        str(endpoint),
        _NAME,
        min_nodes,
        max_nodes,
        address,
        join_timeout=max(1, round(timeout)),
        last_call_timeout=_LAST_CALL_SECONDS,
        close_timeout=5,
        keep_alive_interval=_HEARTBEAT_SECONDS,
        keep_alive_max_attempt=_HEARTBEATS_MISSED,
    )
    store = _open_store(endpoint, timeout)
    return SeveralMachines(create_handler(store, JsonBackend(store, _NAME), parameters), store)


def _open_store(endpoint: Endpoint, timeout: float) -> TCPStore:
    """Serve the store if the address is one of this machine and nobody serves it yet, else wait until it answers.

    The wait is ours, not the store's: that one cannot be interrupted and complains on the terminal.
    """
    deadline = time.monotonic() + timeout
    patience = timedelta(seconds=max(1.0, timeout))
    while True:
        if store := _serve(endpoint, patience):
            return store
        if can_connect(endpoint, timeout=2.0):
            with suppress(RuntimeError):  # who served it has ended just now, or serves something else
                return TCPStore(endpoint.host, endpoint.port, None, False, patience)
        if time.monotonic() >= deadline:
            raise PacelineError(
                f"--rendezvous {endpoint}: nobody answers after {timeout:g} s; start the same command on "
                f"{endpoint.host}, open its port {endpoint.port}, or wait longer with --rendezvous-timeout"
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _serve(endpoint: Endpoint, timeout: timedelta) -> TCPStore | None:
    """The store, served by this process; None if another machine, or another launcher of this one, is to do that."""
    try:
        return serve_store(endpoint.host, endpoint.port, timeout)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise UsageError(f"--rendezvous {endpoint}: cannot be served: {error.strerror}; choose another port") from error
