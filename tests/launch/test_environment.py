"""The place of a process, from the variables of those who start processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import cli
from paceline.core.errors import UsageError
from paceline.core.place import Place, restored_variables, set_variables
from paceline.core.world import World, join
from paceline.launch.devices import use_devices
from paceline.launch.environment import find_place, first_host, restart_count, threads_of_each

SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_JOB_NODELIST": "gpu[07-08,12]",
}


def test_a_process_that_nobody_started_has_no_place() -> None:
    assert find_place({}) is None
    assert find_place({"RANK": "", "WORLD_SIZE": ""}) is None


def test_torchrun_and_our_own_launcher() -> None:
    names = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    found = find_place(names | {"MASTER_ADDR": "host", "MASTER_PORT": "29500"})
    assert found == Place(3, 8, 1, 2, "host", 29500)
    assert found.variables() == names | {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert find_place({"RANK": "0", "WORLD_SIZE": "1"}) == Place(0, 1, 0, 1, "127.0.0.1", 20000)
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        find_place(names)


def test_slurm_over_several_machines() -> None:
    assert find_place(SLURM) == Place(5, 7, 1, 3, "gpu07", 20000 + 1234567 % 12000)
    assert find_place({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}) == Place(5, 7, 1, 3, "10.0.0.1", 7)
    given = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_TASKS_PER_NODE"}
    place = find_place({**given, "SLURM_NNODES": "3"})
    assert place is not None
    assert place.local_world == 2


def test_slurm_on_one_machine_needs_no_name() -> None:
    place = find_place({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "12"})
    assert place == Place(1, 2, 1, 2, "127.0.0.1", 20012)


def test_the_shell_of_a_slurm_job_is_no_task() -> None:
    shell = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert find_place({**shell, "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}) is None
    assert find_place({**SLURM, "ENVIRONMENT": "BATCH"}) is not None
    assert find_place({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_open_mpi() -> None:
    names = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}
    with pytest.raises(UsageError, match="-x MASTER_ADDR"):
        find_place(variables)
    found = find_place({**variables, "MASTER_ADDR": "host"})
    assert found is not None
    assert (found.rank, found.world, found.local_rank, found.local_world, found.address) == (3, 4, 1, 2, "host")
    assert 20000 <= found.port < 32000
    alone = find_place({**variables, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert alone is not None
    assert alone.address == "127.0.0.1"


_TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
_NONSENSE = [
    ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE"),
    ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE"),
    ({"RANK": "5", "WORLD_SIZE": "1"}, "RANK"),
    ({**_TWO, "RANK": "2"}, "RANK"),
    ({**_TWO, "RANK": "-1"}, "RANK"),
    ({**_TWO, "MASTER_PORT": "99999"}, "MASTER_PORT"),
    ({**_TWO, "MASTER_PORT": "0"}, "MASTER_PORT"),
    ({**_TWO, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
    ({**_TWO, "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE"),
    ({**_TWO, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "1"}, "LOCAL_RANK"),
    ({**SLURM, "SLURM_PROCID": "7"}, "SLURM_PROCID"),
    ({**SLURM, "SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS"),
    ({**SLURM, "SLURM_NODEID": "9", "SLURM_NNODES": "0"}, "SLURM_NNODES"),
    ({**SLURM, "MASTER_PORT": "65536"}, "MASTER_PORT"),
    ({**_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK"),
    ({**_MPI, "OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_SIZE"),
]


@pytest.mark.parametrize(("variables", "name"), _NONSENSE)
def test_variables_that_describe_no_place(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert cli.main(["train", "quickstart"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"variable {name}: expected a whole number" in lines[0]


def test_commands_that_start_no_processes_look_at_the_same_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")  # somebody's, for something else
    assert join("cpu") == World(0, 1, 0, torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UsageError, match="variable RANK"):
        join("cpu")
    for name, value in {**_TWO, "MASTER_ADDR": "no such host"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="MASTER_ADDR=no such host"):
        join("cpu")


def test_a_launcher_that_is_no_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_LAUNCHER", "me")
    assert cli.main(["recipes"]) == 2
    assert "PACELINE_LAUNCHER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3,7-9]", "gpu3"),
        ("rack-a[1-2]n[003-004]", "rack-a1n003"),
        ("a[1-2].cluster.org", "a1.cluster.org"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@given(
    st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True), st.integers(0, 999), st.integers(0, 999), st.integers(1, 4)
)
def test_first_host_of_any_range(name: str, low: int, more: int, width: int) -> None:
    start = f"{low:0{width}d}"
    assert first_host(f"{name}[{start}-{low + more},{low}]x,other[1-2]") == f"{name}{start}x"


def test_no_machine_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        first_host("")


def test_restarts_of_whoever_keeps_the_run_alive() -> None:
    assert restart_count({}) == 0
    assert restart_count({"PACELINE_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "1"}) == 2
    assert restart_count({"PACELINE_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0"}) == 0
    assert restart_count({"TORCHELASTIC_RESTART_COUNT": "1"}) == 1
    assert restart_count({"SLURM_RESTART_COUNT": "4"}) == 4


def test_cores_are_divided_and_never_run_out() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [threads_of_each(processes) for processes in (1, cores, cores + 1)] == [cores, 1, 1]
    assert threads_of_each(2, {"SLURM_CPUS_PER_TASK": "6"}) == 6


def test_a_place_is_taken_without_torch() -> None:
    code = (
        "import os, sys; from paceline.launch.environment import take_place; place = take_place();"
        "import paceline.launch.launcher, paceline.launch.launcher, paceline.launch.failure;"
        "print(place.rank, os.environ['RANK'], os.environ['MASTER_PORT'], 'torch' in sys.modules)"
    )
    variables = {"PATH": os.environ["PATH"], "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1 1 20007 False\n", "")


def test_a_command_called_from_python_leaves_the_environment_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task of Slurm that is refused after it took its place."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert cli.main(["train", "quickstart", "train.device=cuda", "train.devices=[0]"]) == 2
    assert "2 processes for 1 device" in capsys.readouterr().err
    assert dict(os.environ) == before


def test_variables_are_put_back_to_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    before = dict(os.environ)
    with restored_variables():
        use_devices([1], 1)
        with restored_variables():
            set_variables({"CUDA_VISIBLE_DEVICES": "9"})
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "9"  # the outermost puts back
    assert dict(os.environ) == before
