"""Where the launchers of a run's machines find each other. On one machine there is nobody to find."""

from __future__ import annotations

import time

from torch import distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.utils.distributed import get_free_port

from paceline.core.errors import PacelineError
from paceline.launch.machines import Machines, OneMachine, SeveralMachines
from paceline.launch.network import Endpoint, address_towards, can_connect, is_here

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
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))

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
    parameters = RendezvousParameters(
        "c10d",
        str(endpoint),
        _NAME,
        min_nodes,
        max_nodes,
        address_towards(endpoint),
        join_timeout=max(1, round(timeout)),
        last_call_timeout=_LAST_CALL_SECONDS,
        close_timeout=5,
        keep_alive_interval=_HEARTBEAT_SECONDS,
        keep_alive_max_attempt=_HEARTBEATS_MISSED,
        read_timeout=max(1, round(timeout)),
    )
    try:
        backend, store = create_backend(_with_store(parameters, endpoint, timeout))
    except RendezvousConnectionError:
        # Another launcher of this machine was quicker to serve the store, or it ended just now: once more.
        backend, store = create_backend(_with_store(parameters, endpoint, timeout))
    return SeveralMachines(create_handler(store, backend, parameters), store)


def _with_store(parameters: RendezvousParameters, endpoint: Endpoint, timeout: float) -> RendezvousParameters:
    """Serve the store if the address is one of this machine and nobody serves it yet, else wait until it answers.

    The wait is ours, not the store's: that one cannot be interrupted and complains on the terminal.
    """
    parameters.config["is_host"] = is_here(endpoint) and not can_connect(endpoint, timeout=1.0)
    if parameters.config["is_host"]:
        return parameters
    deadline = time.monotonic() + timeout
    while not can_connect(endpoint, timeout=2.0):
        if time.monotonic() >= deadline:
            raise PacelineError(
                f"--rendezvous {endpoint}: nobody answers after {timeout:g} s; start the same command on "
                f"{endpoint.host}, open its port {endpoint.port}, or wait longer with --rendezvous-timeout"
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)
    return parameters
