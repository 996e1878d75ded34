"""A run over two machines, which may lose one and get it back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import TIMEOUT, is_alive, launcher, notes, wait_until, write_worker
from namespaces import Machine, two_machines

from paceline.launch.local import Launch
from paceline.launch.network import Endpoint

# Goes on, all processes in step, until a file says that it is enough; each start and its world is noted.
_STEPS = """
    import torch
    from torch import distributed as dist
    def body():
        dist.init_process_group("gloo")
        total = torch.zeros(2)
        while not total[1]:
            time.sleep(0.02)
            total = torch.tensor([1.0, float(Path("enough").exists())])
            dist.all_reduce(total)
            note(f"{start} {int(total[0])} {os.getpid()}")
        dist.barrier()
        dist.destroy_process_group()
        return 0
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as pair:
        yield pair


def steps(folder: Path, rank: int) -> list[tuple[int, int, int]]:
    """What a rank has noted: the restarts before, the size of its world, the id of its process."""
    found = [line.split() for line in notes(folder, rank)]
    return [(int(words[0]), int(words[1]), int(words[2])) for words in found if len(words) == 3]


def test_a_run_over_both_finishes(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    write_worker(tmp_path, _STEPS)
    (tmp_path / "enough").touch()
    plan = Launch(1, 2, 2, Endpoint(machines[0].address, 29400))
    going = [machine.start(launcher(plan), tmp_path, f"{machine.name}.log") for machine in machines]
    assert [process.wait(TIMEOUT) for process in going] == [0, 0], _logs(tmp_path)
    assert [[step[:2] for step in steps(tmp_path, rank)] for rank in (0, 1)] == [[(0, 2)]] * 2


def test_an_error_on_one_machine_ends_the_other_alike(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    body = """
    def body():
        if rank == 1:
            raise DataError("cat.jpg: cannot be read")
        time.sleep(0.2)
        raise RuntimeError("Connection closed by peer")
    """
    write_worker(tmp_path, body)
    plan = Launch(1, 2, 2, Endpoint(machines[0].address, 29401))
    going = [machine.start(launcher(plan), tmp_path, f"{machine.name}.log") for machine in machines]
    assert [process.wait(TIMEOUT) for process in going] == [3, 3], _logs(tmp_path)
    for machine in machines:
        assert (tmp_path / f"{machine.name}.log").read_text().splitlines()[1:] == ["cat.jpg: cannot be read"]


def test_a_lost_machine_may_come_back(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    write_worker(tmp_path, _STEPS)
    plan = Launch(1, 1, 2, Endpoint(machines[0].address, 29402), restarts=1)
    first, second = (machine.start(launcher(plan), tmp_path, f"{machine.name}.log") for machine in machines)

    def in_a_world_of(size: int, after: int) -> bool:
        last = [found[-1] for rank in range(size) if (found := steps(tmp_path, rank))]
        return len(last) == size and all(step[1] == size and step[0] > after for step in last)

    wait_until(lambda: in_a_world_of(2, after=-1), "both machines are at work")
    processes = [steps(tmp_path, rank)[-1][2] for rank in (0, 1)]
    lost = next(process for process in processes if _parent(process) == second.pid)
    os.kill(second.pid, signal.SIGKILL)
    second.wait()
    wait_until(lambda: not is_alive(lost), "the processes of the lost machine have ended")
    wait_until(lambda: in_a_world_of(1, after=0), "the first machine goes on alone")

    second = machines[1].start(launcher(plan), tmp_path, f"{machines[1].name}.log")
    wait_until(lambda: in_a_world_of(2, after=1), "the second machine is back")
    # Neither change was counted: the only restart is still there to be used.
    os.kill(steps(tmp_path, 0)[-1][2], signal.SIGKILL)
    wait_until(lambda: in_a_world_of(2, after=2), "a killed process is back")
    (tmp_path / "enough").touch()
    assert [process.wait(TIMEOUT) for process in (first, second)] == [0, 0], _logs(tmp_path)


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _logs(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("*.log")))
