"""The rank of this process, from the environment of torchrun, our launcher, Slurm or Open MPI. Needs no torch."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping

from paceline.core.errors import UsageError
from paceline.core.place import (
    FIRST_PORT,
    HERE,
    LAST_PORT,
    Numbers,
    Place,
    read_place,
    set_missing_variables,
    set_variables,
)
from paceline.core.process import end_with_parent, num_cores
from paceline.launch.network import is_loopback, use_interface_of

LAUNCHER = "PACELINE_LAUNCHER"  # process id of our own launcher
RESTARTS = "PACELINE_RESTARTS"  # how often this run was restarted
RECORDS = "PACELINE_RECORDS"  # the folder of exit records
PARENT = "PACELINE_PARENT"  # process id of the sweep that this process ends with

_NUM_PORTS = 12000  # range of ports derived from a job id
LAUNCHED = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", LAUNCHER, RECORDS, RESTARTS}
)
"""Variables that give a process its place among others, which a process of its own must not have."""


def take_place() -> Place | None:
    """The place that torchrun, our launcher, Slurm or Open MPI gave this process, written where torch looks for it.

    None: nobody started several processes. Cores are divided among the processes of a machine unless the user has.
    """
    place = find_place(os.environ)
    if place is not None:
        set_variables(place.variables())
        set_missing_variables({"OMP_NUM_THREADS": str(threads_of_each(place.local_world, os.environ))})
        if is_loopback(place.address):
            use_interface_of(place.address)
    return place


def find_place(variables: Mapping[str, str]) -> Place | None:
    """The place that these environment variables describe; None if they describe none."""
    return read_place(variables) or _from_slurm(Numbers(variables)) or _from_open_mpi(Numbers(variables))


def restart_count(variables: Mapping[str, str] | None = None) -> int:
    """How often this run was restarted; 0 at the first start."""
    numbers = Numbers(os.environ if variables is None else variables)
    return sum(numbers.get(name, 0) for name in (RESTARTS, "SLURM_RESTART_COUNT")) or numbers.get(
        "TORCHELASTIC_RESTART_COUNT", 0
    )


def end_with_sweep() -> None:
    """Have this process end with the sweep that started it, if one did."""
    if PARENT in os.environ:
        end_with_parent(Numbers(os.environ).get(PARENT, 0, low=1))
        del os.environ[PARENT]


def is_supervised() -> bool:
    """Whether our launcher started this process, and prints why it ended."""
    return RECORDS in os.environ


def threads_of_each(processes: int, variables: Mapping[str, str] | None = None) -> int:
    """The number of cores for each process of this machine."""
    given = Numbers(variables or {}).get("SLURM_CPUS_PER_TASK", 0)
    return given or max(1, num_cores() // processes)


def first_host(nodes: str) -> str:
    """The first machine of a Slurm node list: `gpu[07-09,12],login1` is `gpu07`."""
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes.strip())
    if name is None:
        raise UsageError(f"SLURM_JOB_NODELIST: no machine in {nodes!r}; set MASTER_ADDR")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name[0])


def _from_slurm(found: Numbers) -> Place | None:
    """From `srun`; the shell of a job script has most of the same variables, but is no task."""
    is_task = found.has("SLURM_STEP_ID") or found.text.get("ENVIRONMENT") != "BATCH"
    if not (is_task and found.has("SLURM_PROCID") and (found.has("SLURM_STEP_NUM_TASKS") or found.has("SLURM_NTASKS"))):
        return None
    world = found.get("SLURM_STEP_NUM_TASKS", found.get("SLURM_NTASKS", 1, low=1), low=1)
    if world == 1:
        return None
    local_world = _slurm_tasks_here(found, world)
    nodes = found.text.get("SLURM_STEP_NODELIST") or found.text.get("SLURM_JOB_NODELIST") or ""
    port = FIRST_PORT + found.get("SLURM_JOB_ID", 0) % _NUM_PORTS
    address, port = _master_address(found, local_world == world, lambda: first_host(nodes), port)
    rank, local_rank = (found.get(name, 0, high=world - 1) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    return Place(rank, world, local_rank, local_world, address, port)


def _from_open_mpi(found: Numbers) -> Place | None:
    """From `mpirun`."""
    world = found.get("OMPI_COMM_WORLD_SIZE", 1, low=1)
    if not found.has("OMPI_COMM_WORLD_RANK") or world == 1:
        return None
    rank = found.get("OMPI_COMM_WORLD_RANK", 0, high=world - 1)
    local_world = found.get("OMPI_COMM_WORLD_LOCAL_SIZE", world, low=1, high=world)
    local_rank = found.get("OMPI_COMM_WORLD_LOCAL_RANK", 0, high=local_world - 1)
    job = found.text.get("PMIX_NAMESPACE") or found.text.get("OMPI_MCA_ess_base_jobid", "")

    def unknown() -> str:
        raise UsageError("mpirun on several machines: set that of rank 0 with -x MASTER_ADDR=HOST")

    port = FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
    address, port = _master_address(found, local_world == world, unknown, port)
    return Place(rank, world, local_rank, local_world, address, port)


def _master_address(
    found: Numbers, one_machine: bool, find_host: Callable[[], str], default_port: int
) -> tuple[str, int]:
    """The address and port of rank 0: set by the user, or this machine, or found by `find_host`."""
    address = found.text.get("MASTER_ADDR") or (HERE if one_machine else find_host())
    return address, found.get("MASTER_PORT", default_port, low=1, high=LAST_PORT)


def _slurm_tasks_here(found: Numbers, world: int) -> int:
    """The tasks on this machine; Slurm writes `2(x3),1` for two on each of three machines and one on the last."""
    counts: list[int] = []
    tasks_per_node = found.text.get("SLURM_STEP_TASKS_PER_NODE") or found.text.get("SLURM_TASKS_PER_NODE") or ""
    for tasks, times in re.findall(r"(\d{1,6})(?:\(x(\d{1,6})\))?", tasks_per_node):
        counts += [int(tasks)] * int(times or 1)
    machine = found.get("SLURM_NODEID", 0)
    num_machines = found.get("SLURM_STEP_NUM_NODES", found.get("SLURM_NNODES", 1, low=1), low=1)
    return max(1, counts[machine] if machine < len(counts) else world // num_machines)
