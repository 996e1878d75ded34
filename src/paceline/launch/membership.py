"""Which machines take part in a run, as JSON in the store that their launchers share.

Torch's handler pickles this state, and unpickles what it finds: whoever reached the store could have any code executed.
"""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token, _NodeDesc, _RendezvousState

_Machine = list[str | int]


class JsonBackend(C10dRendezvousBackend):
    """Puts JSON into the store. Only what was made in this process, for or by its handler, is a pickle."""

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state, and a token by which a change of it is noticed."""
        found = super().get_state()
        return found and (_pickled(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Set the state if the token is still the right one; the state that holds now, and whether it is this one."""
        found = super().set_state(encode(pickle.loads(state)), token)
        return found and (_pickled(found[0]), *found[1:])


def encode(state: _RendezvousState) -> bytes:
    """The state as JSON."""
    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "deadline": state.deadline and state.deadline.isoformat(),
            "closed": state.closed,
            "participants": [[*_listed(machine), rank] for machine, rank in state.participants.items()],
            "wait_list": [_listed(machine) for machine in sorted(state.wait_list)],
            "redundancy_list": [_listed(machine) for machine in sorted(state.redundancy_list)],
            "last_heartbeats": [[*_listed(machine), at.isoformat()] for machine, at in state.last_heartbeats.items()],
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
        raise RendezvousStateError("what the store holds is not the state of a rendezvous") from error
    return state


def _pickled(text: bytes) -> bytes:
    return pickle.dumps(decode(text))


def _listed(machine: _NodeDesc) -> _Machine:
    return [machine.addr, machine.pid, machine.local_id]


def _machine(listed: Any) -> _NodeDesc:
    address, pid, number = listed
    return _NodeDesc(str(address), int(pid), int(number))
