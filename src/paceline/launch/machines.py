"""What the launchers of a run's machines tell each other. One machine is a null object: nobody to tell."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from paceline.launch.exit_record import Record

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LOOK_SECONDS = 0.05
_VERDICT_SECONDS = 1.0
# Keys that last as long as the run, and keys of one start.
_VERDICT, _STARTS = "paceline/verdict", "paceline/starts"
_THIS_START, _REGROUPING, _DONE = "paceline/start", "paceline/regrouping", "paceline/done"


class Machines(Protocol):
    """The machines of a run, as one of them sees the others."""

    handler: RendezvousHandler

    def begin(self, store: Store, machine: int, num_machines: int) -> int:
        """All are there for a new start, with a store of its own; its number from 1, the same everywhere."""

    def num_lost(self) -> int:
        """The machines of this start that have left it or fell silent, while none has finished."""

    def regroup(self) -> None:
        """Say that the processes are stopped to let a machine in."""

    def are_regrouping(self) -> bool:
        """Whether another machine has said so."""

    def publish(self, record: Record) -> None:
        """Tell of an error that starting again does not mend, so that all end alike."""

    def verdict(self) -> Record | None:
        """What another machine has told so, if it does within a moment."""

    def finish(self, seconds: float) -> None:
        """Wait for the others to end too: what they speak through may be served by this machine."""


class OneMachine:
    """Nobody to wait for."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self.handler = handler
        self._num_starts = 0

    def begin(self, store: Store, machine: int, num_machines: int) -> int:
        """The number of the start, from 1."""
        self._num_starts += 1
        return self._num_starts

    def num_lost(self) -> int:
        """None can be."""
        return 0

    def regroup(self) -> None:
        """Nobody needs to know."""

    def are_regrouping(self) -> bool:
        """Never."""
        return False

    def publish(self, record: Record) -> None:
        """Nobody needs to know."""

    def verdict(self) -> Record | None:
        """There is none."""
        return None

    def finish(self, seconds: float) -> None:
        """Nobody is waited for."""


class SeveralMachines:
    """Machines that share a store for the whole run; a lost connection to it is left to the agent to find."""

    def __init__(self, handler: DynamicRendezvousHandler, store: Store) -> None:
        self.handler: RendezvousHandler = handler
        self._state = handler._state_holder
        self._run = store
        self._start = store
        self._num_machines = 0

    def begin(self, store: Store, machine: int, num_machines: int) -> int:
        """The number of the start, counted by the first machine."""
        self._start, self._num_machines = store, num_machines
        if machine == 0:
            store.set(_THIS_START, str(self._run.add(_STARTS, 1)))
        return int(store.get(_THIS_START))

    def num_lost(self) -> int:
        """By the heartbeats, as the rendezvous last heard them."""
        lost = self._num_machines - len(self._state.state.participants)
        return lost if lost > 0 and not self._start.add(_DONE, 0) else 0

    def regroup(self) -> None:
        """For the machines of this start."""
        with suppress(RuntimeError):
            self._start.set(_REGROUPING, "1")

    def are_regrouping(self) -> bool:
        """In this start."""
        with suppress(RuntimeError):
            return self._start.check([_REGROUPING])
        return False

    def publish(self, record: Record) -> None:
        """For all machines, those included that come later."""
        with suppress(RuntimeError):
            self._run.set(_VERDICT, record.as_text())

    def verdict(self) -> Record | None:
        """Looked for during a second: the machine with the error may find it later than we its consequence."""
        deadline = time.monotonic() + _VERDICT_SECONDS
        with suppress(RuntimeError, ValueError, TypeError):  # the last two: somebody else has written there
            while time.monotonic() < deadline:
                if self._run.check([_VERDICT]):
                    return Record.from_text(self._run.get(_VERDICT).decode())
                time.sleep(_LOOK_SECONDS)
        return None

    def finish(self, seconds: float) -> None:
        """In small steps: a wait within the store could not be interrupted."""
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            done = self._start.add(_DONE, 1)
            while done < self._num_machines and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                done = self._start.add(_DONE, 0)
