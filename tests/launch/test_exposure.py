"""What somebody else on the network finds of a run: nothing of one on one machine, and nothing that runs their code."""

from __future__ import annotations

import pickle
import sys
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from launching import begin, free_port, launcher, notes, write_worker
from namespaces import Machine, two_machines
from support.waiting import TIMEOUT, wait_until
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from paceline.launch.launcher import Launch
from paceline.launch.network import Endpoint, can_connect
from paceline.launch.rendezvous import decode, encode

# Processes that have met, as those of a run do, and wait.
_MET = """
    import torch
    from paceline.core.world import join
    def body():
        world = join("cpu")
        note(int(world.sum(torch.ones(1))))
        wait_for(Path("go").exists)
        world.leave()
        os._exit(0)
"""
_KNOCK = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 5).close()
        print(port)
    except ConnectionRefusedError:
        pass
"""


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as pair:
        yield pair


def test_a_run_on_one_machine_is_reached_from_no_other(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    write_worker(tmp_path, _MET)
    going = machines[0].start(launcher(Launch(2)), tmp_path, "log")
    wait_until(lambda: notes(tmp_path, 0) == notes(tmp_path, 1) == ["2"] or going.poll() is not None, "they have met")
    open_ports = machines[0].listening()
    answered = machines[1].run(sys.executable, "-c", _KNOCK, machines[0].address, *map(str, open_ports))
    (tmp_path / "go").touch()
    assert going.wait(TIMEOUT) == 0, (tmp_path / "log").read_text()
    assert len(open_ports) >= 3, "the store, and each process for the other"
    assert (set(open_ports.values()), answered) == ({"127.0.0.1"}, "")


class _Planted:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


def test_a_pickle_that_somebody_put_into_the_store_is_not_loaded(tmp_path: Path) -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    with begin(tmp_path, "def body(): return 0", Launch(1, 2, 2, endpoint, rendezvous_timeout=60)) as going:
        wait_until(lambda: can_connect(endpoint, 1.0), "the store is served")
        store = TCPStore(endpoint.host, endpoint.port, None, False, timedelta(seconds=30))
        planted = b64encode(pickle.dumps(_Planted(tmp_path / "executed"))).decode()
        store.set("torch.rendezvous.paceline", planted)
        done = going.wait()
    assert not (tmp_path / "executed").exists()
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 2), done.stderr


def test_membership_is_the_same_when_it_is_read_again() -> None:
    state, now = _RendezvousState(), datetime.now(UTC)
    first, second, third = (_NodeDesc("10.0.0.1", 7 + number, number) for number in range(3))
    assert vars(decode(encode(state))) == vars(state)
    state.round, state.complete, state.closed, state.deadline = 3, True, True, now
    state.participants, state.wait_list, state.redundancy_list = {second: 1, first: 0}, {third}, {first, third}
    state.last_heartbeats = {first: now, third: now + timedelta(seconds=1)}
    assert vars(decode(encode(state))) == vars(state)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"3",
        b"\xff",
        b"[" * 100000,
        pickle.dumps(3),
        encode(_RendezvousState()).replace(b"0", b'"x"'),
    ],
)
def test_what_is_no_membership_is_refused(text: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        decode(text)
