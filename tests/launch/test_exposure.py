"""What somebody else on the network finds of a run: nothing of one on one machine, and nothing that runs their code."""

from __future__ import annotations

import pickle
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from launching import begin, free_port, launcher, notes, write_worker
from namespaces import Machine, two_machines
from support.waiting import TIMEOUT, wait_until
from torch import distributed as dist

from paceline.launch.machines import Launch
from paceline.launch.network import Endpoint, can_connect

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


@pytest.mark.parametrize(
    "planted",
    [
        lambda path: b64encode(pickle.dumps(_Planted(path))).decode(),
        lambda path: pickle.dumps(_Planted(path), 0).decode("latin-1"),
        lambda path: "",
        lambda path: "{}",
        lambda path: "[1]",
        lambda path: "[" * 100000,
        lambda path: '["x", 3]',
    ],
)
def test_what_somebody_put_into_the_store_is_never_run(tmp_path: Path, planted: Callable[[Path], str]) -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    with begin(tmp_path, "def body(): return 0", Launch(1, 2, 2, endpoint, rendezvous_timeout=60)) as going:
        wait_until(lambda: can_connect(endpoint, 1.0), "the store is served")
        store = dist.TCPStore(endpoint.host, endpoint.port, None, False, timedelta(seconds=30))  # type: ignore[attr-defined]
        store.set(f"paceline/machine/{store.add('paceline/machines', 1)}", planted(tmp_path / "executed"))
        done = going.wait()
    assert not (tmp_path / "executed").exists()
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 2), done.stderr
