"""Messages between the launchers of a run's machines. One machine is a null object."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from paceline.launch.failure import ExitRecord

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_SECONDS = 0.05
_FAILURE_SECONDS = 1.0
# Keys of the whole run, and keys of one start.
_FAILURE, _STARTS = "paceline/failure", "paceline/starts"
_THIS_START, _REGROUPING, _DONE = "paceline/start", "paceline/regrouping", "paceline/done"


class Machines(Protocol):
    """The machines of a run, from the view of one."""

    handler: RendezvousHandler

    def begin(self, store: Store, machine: int, num_machines: int) -> int:
        """Begin a new start with its own store; returns its number, counted from 1, equal on all machines."""

    def num_lost(self) -> int:
        """How many machines of this start have left or sent no heartbeat, while none has finished."""

    def regroup(self) -> None:
        """Announce that processes stop so that a machine can join."""

    def are_regrouping(self) -> bool:
        """Whether another machine has announced that."""

    def share_failure(self, record: ExitRecord) -> None:
        """Share an error that a restart does not fix, so that all machines end with it."""

    def peer_failure(self) -> ExitRecord | None:
        """The error that another machine has shared, after a short wait."""

    def finish(self, seconds: float) -> None:
        """Wait for the others to end too, since this machine may serve the store."""


class OneMachine:
    """A run on one machine."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self.handler = handler
        self._num_starts = 0

    def begin(self, store: Store, machine: int, num_machines: int) -> int:
        """The number of the start, from 1."""
        self._num_starts += 1
        return self._num_starts

    def num_lost(self) -> int:
        """0."""
        return 0

    def regroup(self) -> None:
        """Do nothing."""

    def are_regrouping(self) -> bool:
        """Never."""
        return False

    def share_failure(self, record: ExitRecord) -> None:
        """Do nothing."""

    def peer_failure(self) -> ExitRecord | None:
        """None."""
        return None

    def finish(self, seconds: float) -> None:
        """Do nothing."""


class SeveralMachines:
    """Machines that share a store for the whole run; the agent notices a lost connection to it."""

    def __init__(self, handler: DynamicRendezvousHandler, store: Store) -> None:
        self.handler: RendezvousHandler = handler
        self._state = handler._state_holder
        self._run = store
        self._start = store
        self._num_machines = 0

    def begin(self, store: Store, machine: int, num_machines: int) -> int:
        """The number of the start, which machine 0 counts."""
        self._start, self._num_machines = store, num_machines
        if machine == 0:
            store.set(_THIS_START, str(self._run.add(_STARTS, 1)))
        return int(store.get(_THIS_START))

    def num_lost(self) -> int:
        """By the heartbeats of the rendezvous."""
        lost = self._num_machines - len(self._state.state.participants)
        return lost if lost > 0 and not self._start.add(_DONE, 0) else 0

    def regroup(self) -> None:
        """Announce it to the machines of this start."""
        with suppress(RuntimeError):
            self._start.set(_REGROUPING, "1")

    def are_regrouping(self) -> bool:
        """In this start."""
        with suppress(RuntimeError):
            return self._start.check([_REGROUPING])
        return False

    def share_failure(self, record: ExitRecord) -> None:
        """Share it with all machines, including later ones."""
        with suppress(RuntimeError):
            self._run.set(_FAILURE, record.as_text())

    def peer_failure(self) -> ExitRecord | None:
        """Polled for a second: we may see the consequence before the other machine finds its error."""
        deadline = time.monotonic() + _FAILURE_SECONDS
        with suppress(RuntimeError, ValueError, TypeError):  # the last two: something else wrote there
            while time.monotonic() < deadline:
                if self._run.check([_FAILURE]):
                    return ExitRecord.from_text(self._run.get(_FAILURE).decode())
                time.sleep(_POLL_SECONDS)
        return None

    def finish(self, seconds: float) -> None:
        """Poll, since a wait inside the store cannot be interrupted."""
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            done = self._start.add(_DONE, 1)
            while done < self._num_machines and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                done = self._start.add(_DONE, 0)
