"""Processes that really talk to each other, through torch, under our launcher and under others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment, free_port, notes, run
from support.waiting import TIMEOUT

from paceline.launch.machines import Launch

_SUM = """
    import torch
    from torch import distributed as dist
    def body():
        dist.init_process_group("gloo")
        number = torch.tensor([2.0 ** rank])
        dist.all_reduce(number)
        note(int(number))
        if start == 0 and rank == KILLED:
            wait_for_all()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        dist.destroy_process_group()
        return 0
"""


@pytest.mark.parametrize(("processes", "killed"), [(2, 0), (3, 1)])
def test_a_process_killed_among_others_comes_back(tmp_path: Path, processes: int, killed: int) -> None:
    done = run(tmp_path, _SUM.replace("KILLED", str(killed)), Launch(processes))
    assert done.returncode == 0
    assert done.stderr == f"process {killed} was killed by SIGKILL; restarting (1 of 3 restarts)\n"
    total = str(2**processes - 1)
    assert [notes(tmp_path, rank) for rank in range(processes)] == [[total, total]] * processes


_FOUND = """
from pathlib import Path
from paceline.launch.environment import take_place
place = take_place()
import torch
from torch import distributed as dist
dist.init_process_group("gloo")
number = torch.tensor([float(place.rank)])
dist.all_reduce(number)
Path(f"found-{place.rank}").write_text(f"{place.rank} {place.world} {place.local_rank} {int(number)}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("starter", ["slurm", "open mpi", "torchrun"])
def test_processes_that_others_started_find_each_other(tmp_path: Path, starter: str) -> None:
    (tmp_path / "found.py").write_text(_FOUND)
    port = str(free_port())
    if starter == "torchrun":
        command = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", "found.py"]
        assert _found(tmp_path, [command], [{}]) == ["0 2 0 1", "1 2 1 1"]
        return
    slurm = {"SLURM_PROCID": "RANK", "SLURM_LOCALID": "RANK", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "here"}
    open_mpi = {f"OMPI_COMM_WORLD_{name}": "RANK" for name in ("RANK", "LOCAL_RANK")} | {
        f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")
    }
    given = (slurm if starter == "slurm" else open_mpi) | {"MASTER_PORT": port}
    variables = [{name: value.replace("RANK", rank) for name, value in given.items()} for rank in "01"]
    assert _found(tmp_path, [["found.py"]] * 2, variables) == ["0 2 0 1", "1 2 1 1"]


def _found(folder: Path, commands: list[list[str]], variables: list[dict[str, str]]) -> list[str]:
    going = [
        subprocess.Popen([sys.executable, *command], cwd=folder, env=environment(**more), stdout=subprocess.DEVNULL)
        for command, more in zip(commands, variables, strict=True)
    ]
    assert [process.wait(TIMEOUT) for process in going] == [0] * len(going)
    return [path.read_text() for path in sorted(folder.glob("found-*"))]
