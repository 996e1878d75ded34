"""Rendezvous of a run's machines, with JSON in the shared store. One machine needs none.

torch's handler pickles its state and unpickles what it finds in the store: whoever reached the store could run code.
"""

from __future__ import annotations

import errno
import json
import pickle
import time
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    Token,
    _NodeDesc,
    _RendezvousState,
    create_handler,
)
from torch.distributed.elastic.utils.distributed import get_free_port

from paceline.core.errors import PacelineError, UsageError
from paceline.core.place import HERE
from paceline.core.world import serve_store
from paceline.launch.machines import Machines, OneMachine, SeveralMachines
from paceline.launch.network import Endpoint, address_towards, can_connect, is_loopback

_NAME = "paceline"
# How long to wait for more machines once there are enough; later ones join the running run.
_LAST_CALL_SECONDS = 3
# A machine without a heartbeat for the product of these is lost.
_HEARTBEAT_SECONDS, _HEARTBEATS_MISSED = 2, 5
_SECONDS_BETWEEN_TRIES = 0.5


class SingleMachineHandler(RendezvousHandler):
    """The rendezvous of one machine: no server, no waiting, a new port for every start."""

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
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """0: nobody else can join."""
        return 0

    def get_run_id(self) -> str:
        """A name, for logs."""
        return _NAME

    def shutdown(self) -> bool:
        """Nothing to close."""
        return True


def join_rendezvous(endpoint: Endpoint | None, min_nodes: int, max_nodes: int, timeout: float) -> Machines:
    """The machines of a run; an error if several do not connect within `timeout` seconds."""
    if endpoint is None:
        return OneMachine(SingleMachineHandler())
    address = address_towards(endpoint)
    if max_nodes > 1 and is_loopback(address) and not is_loopback(endpoint.host):
        raise UsageError(
            f"--rendezvous {endpoint}: on this machine that name is {address}, which no other machine can reach;"
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
    """Serve the store if the address belongs to this machine and is free, otherwise wait until it answers.

    The store's own wait cannot be interrupted and prints to the terminal.
    """
    deadline = time.monotonic() + timeout
    store_timeout = timedelta(seconds=max(1.0, timeout))
    while True:
        if store := _serve(endpoint, store_timeout):
            return store
        if can_connect(endpoint, timeout=2.0):
            with suppress(RuntimeError):  # the server has just ended, or serves something else
                return TCPStore(endpoint.host, endpoint.port, None, False, store_timeout)
        if time.monotonic() >= deadline:
            raise PacelineError(
                f"--rendezvous {endpoint}: no answer after {timeout:g} s; start the same command on "
                f"{endpoint.host}, open its port {endpoint.port}, or wait longer with --rendezvous-timeout"
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _serve(endpoint: Endpoint, timeout: timedelta) -> TCPStore | None:
    """The store, served by this process; None if another machine or launcher has the address."""
    try:
        return serve_store(endpoint.host, endpoint.port, timeout)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise UsageError(f"--rendezvous {endpoint}: cannot be served: {error.strerror}; choose another port") from error


_Machine = list[str | int]


class JsonBackend(C10dRendezvousBackend):
    """A rendezvous backend that stores JSON; only bytes made in this process, for its handler, are pickles."""

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state, and a token that changes with it."""
        found = super().get_state()
        return found and (_to_pickle(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Set the state if the token is current; returns the current state, its token, and whether it was set."""
        found = super().set_state(encode(pickle.loads(state)), token)
        return found and (_to_pickle(found[0]), *found[1:])


def encode(state: _RendezvousState) -> bytes:
    """The state as JSON."""
    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "deadline": state.deadline and state.deadline.isoformat(),
            "closed": state.closed,
            "participants": [[*_to_list(machine), rank] for machine, rank in state.participants.items()],
            "wait_list": [_to_list(machine) for machine in sorted(state.wait_list)],
            "redundancy_list": [_to_list(machine) for machine in sorted(state.redundancy_list)],
            "last_heartbeats": [[*_to_list(machine), at.isoformat()] for machine, at in state.last_heartbeats.items()],
        }
    ).encode()


def decode(text: bytes) -> _RendezvousState:
    """The state that `encode` wrote; RendezvousStateError for anything else."""
    try:
        found = json.loads(text)
        state = _RendezvousState()
        state.round = int(found["round"])
        state.complete, state.closed = bool(found["complete"]), bool(found["closed"])
        state.deadline = datetime.fromisoformat(found["deadline"]) if found["deadline"] else None
        state.participants = {_machine(machine): int(rank) for *machine, rank in found["participants"]}
        state.wait_list = {_machine(machine) for machine in found["wait_list"]}
        state.redundancy_list = {_machine(machine) for machine in found["redundancy_list"]}
        state.last_heartbeats = {
            _machine(machine): datetime.fromisoformat(time) for *machine, time in found["last_heartbeats"]
        }
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RendezvousStateError("the store does not contain a rendezvous state") from error
    return state


def _to_pickle(text: bytes) -> bytes:
    return pickle.dumps(decode(text))


def _to_list(machine: _NodeDesc) -> _Machine:
    return [machine.addr, machine.pid, machine.local_id]


def _machine(entry: Any) -> _NodeDesc:
    address, pid, number = entry
    return _NodeDesc(str(address), int(pid), int(number))
