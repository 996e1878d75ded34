"""The machines of a run: they meet in a store, agree on who takes part in each start, and learn who is lost.

The machine that serves the store leads: the run cannot go on without it anyway. Machines send each other JSON, so
nobody who reaches the store can run code. One machine is a run with a store in memory.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError, UsageError
from paceline.core.place import HERE
from paceline.core.text import pluralize
from paceline.launch.failure import ExitRecord
from paceline.launch.network import Endpoint, address_towards, can_connect, free_port, is_loopback

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

# How long to wait for more machines once there are enough; later ones join the running run.
_LAST_CALL_SECONDS = 3.0
_HEARTBEAT_SECONDS, _LOST_SECONDS = 2.0, 10.0
_LOOK_SECONDS, _POLL_SECONDS, _FAILURE_SECONDS = 0.5, 0.05, 1.0
_SECONDS_BETWEEN_TRIES = 0.5
# Keys of the store: of the whole run, of one machine (by its number) and of one start.
_MACHINES, _STARTS, _FAILURE, _ENDED = (f"paceline/{name}" for name in ("machines", "starts", "failure", "ended"))
_MACHINE, _BEATS = (f"paceline/{name}/{{}}" for name in ("machine", "beats"))
_START, _CHANGE, _DONE, _GONE = (f"paceline/{name}/{{}}" for name in ("start", "change", "done", "gone"))


@dataclass(frozen=True)
class Launch:
    """Number of processes and machines; times in seconds."""

    processes: int
    min_nodes: int = 1
    max_nodes: int = 1
    rendezvous: Endpoint | None = None
    rendezvous_timeout: float = 60.0
    restarts: int = 3
    stop_timeout: float = 60.0  # for processes to save and exit after a request to stop


@dataclass(frozen=True)
class Start:
    """A start of the run's processes, from the view of one machine; `number` counts from 1."""

    number: int
    num_machines: int
    first_rank: int
    world: int
    address: str
    port: int


class Change(Enum):
    """Why the processes of a start should end."""

    JOINING = "joining"
    """Another machine waits, and they have time to save."""
    LOST = "lost"
    """A machine sends no heartbeat, or its processes have ended."""


class Machines:
    """The machines of a run, from the view of one; the one that `leads` serves the store."""

    def __init__(self, plan: Launch, store: TCPStore | MemoryStore, leads: bool = True, address: str = HERE) -> None:
        self._plan, self._store, self._leads, self._address = plan, store, leads, address
        self._where = f"--rendezvous {plan.rendezvous}"  # for messages
        self._last = 0  # the start that this machine took part in last
        self._members: dict[str, int] = {}
        self._seen: dict[str, tuple[int, float]] = {}  # heartbeats of each machine, and when their number last rose
        self._change: Change | None = None
        self._next_look = 0.0
        with self._connected():
            self._name = str(store.add(_MACHINES, 1))
        if self._plan.max_nodes > 1:
            threading.Thread(target=self._send_heartbeats, name="machine-heartbeat", daemon=True).start()

    def begin(self) -> Start:
        """Wait for enough machines; the next start that this one takes part in."""
        last_call: float | None = None
        with self._connected(), self._readable():
            timeout = self._plan.rendezvous_timeout
            if self._store.add(_STARTS, 0):  # processes of others may save first
                timeout += self._plan.stop_timeout
            deadline = time.monotonic() + timeout
            self._store.set(_MACHINE.format(self._name), json.dumps([self._plan.processes, self._last]))
            while True:
                if self._store.check([_ENDED]):
                    self._store.add(_GONE.format(self._last), 1)
                    raise self._ended()
                if self._leads:
                    last_call = self._choose(last_call)
                number = self._store.add(_STARTS, 0)
                if number > self._last and (start := self._read_start(number)):
                    return start
                if time.monotonic() > deadline:
                    raise PacelineError(
                        f"{self._where}: fewer than {pluralize(self._plan.min_nodes, 'machine')} joined within"
                        f" {timeout:g} s; start the same command on each, or wait longer with"
                        " --rendezvous-timeout"
                    )
                time.sleep(_POLL_SECONDS)

    def change(self) -> Change | None:
        """What has happened to other machines since the start, if anything."""
        if self._plan.max_nodes > 1 and time.monotonic() >= self._next_look:
            with self._connected(), self._readable():
                self._change = self._look_for_change()
            self._next_look = time.monotonic() + _LOOK_SECONDS
        return self._change

    def share_failure(self, record: ExitRecord) -> None:
        """Share an error that a restart does not fix, so that all machines end with it."""
        with suppress(RuntimeError):
            self._store.set(_FAILURE, record.as_text())

    def peer_failure(self) -> ExitRecord | None:
        """The error that another machine has shared: we may see the consequence before it finds its error."""
        deadline = time.monotonic() + _FAILURE_SECONDS
        with suppress(RuntimeError, ValueError, TypeError):  # the last two: something else wrote there
            while self._plan.max_nodes > 1 and time.monotonic() < deadline:
                if self._store.check([_FAILURE]):
                    return ExitRecord.from_text(self._store.get(_FAILURE).decode())
                time.sleep(_POLL_SECONDS)
        return None

    def finish(self, seconds: float, is_done: bool = True) -> None:
        """End the run for all; the leader waits for the others of this start, since it serves the store.

        If it `is_done`, the others are about to be, or still save; else their processes have nothing to wait for.
        """
        key = _DONE if is_done else _GONE
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            self._store.set(_ENDED, "yes")
            if not is_done:
                self._store.set(_CHANGE.format(self._last), Change.LOST.value)
            self._store.add(key.format(self._last), 1)
            while self._leads and self._num_finished() < len(self._members) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def _choose(self, last_call: float | None) -> float | None:
        """Begin a start if enough machines wait for one; returns when to stop waiting for more."""
        key, now = _CHANGE.format(self._last), time.monotonic()
        if not self._store.check([key]):  # the processes of this machine have ended, so those of others must
            self._store.set(key, Change.LOST.value)
        alive = self._alive()
        waiting = {name: processes for name, (processes, last) in alive.items() if last >= self._joined(name)}
        if len(waiting) < self._plan.min_nodes:
            return None
        last_call = last_call or now + _LAST_CALL_SECONDS
        if len(waiting) < len(alive) or (len(waiting) < self._plan.max_nodes and now < last_call):
            return last_call
        # Itself first: others reach it, and it knows which of its ports are free.
        others = [name for name in waiting if name != self._name]
        members = [[name, waiting[name]] for name in (self._name, *others)[: self._plan.max_nodes]]
        number = self._last + 1
        self._store.set(_START.format(number), json.dumps([members, self._address, free_port(self._address)]))
        self._store.add(_STARTS, 1)
        return None

    def _read_start(self, number: int) -> Start | None:
        """A start as it concerns this machine; None if it takes no part in it."""
        members, address, port = json.loads(self._store.get(_START.format(number)))
        members = {str(name): int(num_processes) for name, num_processes in members}
        if self._name not in members:
            return None
        self._last, self._members, self._change = number, members, None
        before = list(members)[: list(members).index(self._name)]
        first_rank = sum(members[name] for name in before)
        return Start(number, len(members), first_rank, sum(members.values()), str(address), int(port))

    def _look_for_change(self) -> Change | None:
        key = _CHANGE.format(self._last)
        if self._store.check([_FAILURE]):
            return Change.LOST
        if self._store.add(_DONE.format(self._last), 0):
            return None
        if self._leads and not self._store.check([key]) and (found := self._find_change()):
            self._store.set(key, found.value)
        return Change(self._store.get(key).decode()) if self._store.check([key]) else None

    def _find_change(self) -> Change | None:
        """The change that the leader sees in the heartbeats."""
        alive = self._alive()
        if any(name not in alive or alive[name][1] >= self._last for name in self._members):
            return Change.LOST
        has_room = len(self._members) < self._plan.max_nodes
        return Change.JOINING if has_room and alive.keys() - self._members.keys() else None

    def _joined(self, name: str) -> int:
        """The last start that a machine took part in, as far as the leader knows."""
        return self._last if name in self._members else 0

    def _num_finished(self) -> int:
        return sum(self._store.add(key.format(self._last), 0) for key in (_DONE, _GONE))

    def _alive(self) -> dict[str, tuple[int, int]]:
        """The machines that send heartbeats: how many processes each has, and the start it took part in last."""
        alive, now = {}, time.monotonic()
        for name in map(str, range(1, self._store.add(_MACHINES, 0) + 1)):
            beats = self._store.add(_BEATS.format(name), 0)
            if name not in self._seen or beats != self._seen[name][0]:
                self._seen[name] = beats, now
            is_alive = name == self._name or now - self._seen[name][1] < _LOST_SECONDS
            if is_alive and self._store.check([_MACHINE.format(name)]):
                processes, last = map(int, json.loads(self._store.get(_MACHINE.format(name))))
                alive[name] = processes, last
        return alive

    def _send_heartbeats(self) -> None:
        with suppress(RuntimeError):
            while True:
                self._store.add(_BEATS.format(self._name), 1)
                time.sleep(_HEARTBEAT_SECONDS)

    def _ended(self) -> PacelineError:
        """The error that another machine has ended the run with."""
        if record := self.peer_failure():
            error = PacelineError(record.message)
            error.exit_code = record.code
            return error
        return PacelineError(f"{self._where}: the run has ended on the other machines")

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, RecursionError) as error:
            raise PacelineError(f"{self._where}: something else writes to its store; choose another port") from error

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # all errors of torch's store are kinds of it
            raise PacelineError(
                f"{self._where}: the connection is lost; the machine that serves it may be down"
            ) from error


class MemoryStore:
    """What `Machines` needs of torch's stores, for one machine, which need not wait for torch to load."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """The value of a key."""
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Count; the new number."""
        self._values[key] = str(number := int(self._values.get(key, b"0")) + amount).encode()
        return number

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return all(key in self._values for key in keys)


def join_machines(plan: Launch) -> Machines:
    """The machines of a run; an error if the store of several cannot be reached in time."""
    endpoint = plan.rendezvous
    if endpoint is None:
        return Machines(plan, MemoryStore())
    address = address_towards(endpoint)
    if plan.max_nodes > 1 and is_loopback(address) and not is_loopback(endpoint.host):
        raise UsageError(
            f"--rendezvous {endpoint}: on this machine that name is {address}, which no other machine can reach;"
            f" use an address that all can reach, as in --rendezvous 10.0.0.1:{endpoint.port}"
        )
    store, leads = _open_store(endpoint, plan.rendezvous_timeout)
    return Machines(plan, store, leads, address)


def _open_store(endpoint: Endpoint, timeout: float) -> tuple[TCPStore, bool]:
    """The store, and whether we serve it: if the address belongs to this machine and is free, else wait for an answer.

    The store's own wait cannot be interrupted and prints to the terminal.
    """
    # Late: torch takes longer to import than everything before.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + timeout
    store_timeout = timedelta(seconds=max(1.0, timeout))
    while True:
        if store := _serve(endpoint, store_timeout):
            return store, True
        if can_connect(endpoint, timeout=2.0):
            with suppress(RuntimeError):  # the server has just ended, or serves something else
                return TCPStore(endpoint.host, endpoint.port, None, False, store_timeout), False
        if time.monotonic() >= deadline:
            raise PacelineError(
                f"--rendezvous {endpoint}: no answer after {timeout:g} s; start the same command on "
                f"{endpoint.host}, open its port {endpoint.port}, or wait longer with --rendezvous-timeout"
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _serve(endpoint: Endpoint, timeout: timedelta) -> TCPStore | None:
    """The store, served by this process; None if another machine or launcher has the address."""
    from paceline.core.world import serve_store

    try:
        return serve_store(endpoint.host, endpoint.port, timeout)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise UsageError(f"--rendezvous {endpoint}: cannot be served: {error.strerror}; choose another port") from error
