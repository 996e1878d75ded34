"""The launcher: what a command's options ask for, and a run of several processes or machines."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paceline.core.errors import Stopped, UsageError
from paceline.core.place import HERE, restored_variables, set_missing_variables
from paceline.core.process import print_error, resume_gc
from paceline.core.temporary import temporary_folder
from paceline.core.text import pluralize
from paceline.launch.devices import ONE_PROCESS, check_exist, default_processes, use_devices
from paceline.launch.environment import take_place, threads_of_each
from paceline.launch.machines import Launch, join_machines
from paceline.launch.network import Endpoint, address_towards, use_interface_of, watch
from paceline.launch.supervisor import Interrupted, StopSignals, Supervisor

_KILLED = 130
_MIN_LIMIT, _PER_CORE = 32, 4  # a typo must not start processes until memory is full


def launch_if_needed(
    options: argparse.Namespace, device: str, devices: Sequence[int] | None, strategy: str = "auto"
) -> int | None:
    """Run the command in the processes that the options describe, and return the exit code; None: run it here.

    A process that a launcher started ignores the options and joins the others. `options.device_notes` is then the
    device mapping as text, if the recipe lists devices.
    """
    place = take_place()
    if place is None:
        if device != "cpu":
            check_exist(devices)
        plan = read_plan(options, default_processes(device, devices, strategy))
        if strategy in ONE_PROCESS and (plan.processes > 1 or plan.rendezvous):
            raise UsageError(f"train.strategy {strategy} runs in one process; use ddp, or remove --procs and --nodes")
        if plan.processes > 1 or plan.rendezvous:
            return launch(worker_command(options.arguments), plan)
    num_processes = place.local_world if place else 1
    mapping = None if device == "cpu" else use_devices(devices, num_processes, strategy)
    options.device_notes = [mapping] if mapping else []
    return None


def read_plan(options: argparse.Namespace, default: int) -> Launch:
    """The launch that a command's options describe."""
    processes = default if options.procs is None else options.procs
    most = max(_MIN_LIMIT, _PER_CORE * (os.cpu_count() or 1))
    if not 1 <= processes <= most:
        raise UsageError(f"--procs: expected a number from 1 to {most} on this machine, got {processes}")
    if options.restarts < 0:
        raise UsageError(f"--restarts: expected a number >= 0, got {options.restarts}")
    if options.nodes is None and options.rendezvous is None:
        return Launch(processes, restarts=options.restarts)
    if options.nodes is None or options.rendezvous is None:
        raise UsageError("--nodes and --rendezvous must be given together, as in --nodes 2 --rendezvous HOST:29400")
    if options.rendezvous_timeout <= 0:
        raise UsageError(f"--rendezvous-timeout: expected seconds > 0, got {options.rendezvous_timeout:g}")
    least, most = read_nodes(options.nodes)
    endpoint = Endpoint.parse(options.rendezvous)
    return Launch(processes, least, most, endpoint, options.rendezvous_timeout, options.restarts)


def read_nodes(text: str) -> tuple[int, int]:
    """The minimum and maximum number of machines, from `2` or `1:4`."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--nodes: expected a number of machines or MIN:MAX, as in 2 or 1:4, got {text!r}")
    return least, most


def worker_command(arguments: Sequence[str]) -> list[str]:
    """The command of a worker: the same arguments; -P keeps the current folder off the import path."""
    return [sys.executable, "-P", "-m", "paceline", *arguments]


def launch(command: Sequence[str], plan: Launch) -> int:
    """Run the command in every process of the plan; returns the exit code."""
    stop = StopSignals()
    try:
        with stop.installed(), restored_variables(), temporary_folder() as folder:
            _prepare_environment(plan)
            return _supervise(command, plan, stop, folder)
    except Interrupted:
        assert stop.received
        _print_line("ended at once" if stop.at_once else f"stopped by {stop.received.name} before training started")
        return _KILLED if stop.at_once else Stopped.exit_code


def _prepare_environment(plan: Launch) -> None:
    """Set what the processes inherit, unless the user has."""
    use_interface_of(address_towards(plan.rendezvous) if plan.rendezvous else HERE)
    set_missing_variables(
        {
            "OMP_NUM_THREADS": str(threads_of_each(plan.processes)),
            # torch's socket warnings, such as unknown host names, are no help to users.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
    )


def _supervise(command: Sequence[str], plan: Launch, stop: StopSignals, folder: Path) -> int:
    if plan.rendezvous:
        least = f"{plan.min_nodes} to " if plan.min_nodes < plan.max_nodes else ""
        _print_line(f"waiting for {least}{pluralize(plan.max_nodes, 'machine')} at {plan.rendezvous}")
    with stop.waiting():
        machines = join_machines(plan)
    resume_gc()
    supervisor = Supervisor(command, plan, machines, stop, folder, _print_line)
    if plan.rendezvous:
        watch(plan.rendezvous, plan.rendezvous_timeout, lambda: _exit_disconnected(supervisor, plan, folder))
    failure = supervisor.run()
    if failure is None:
        return 0
    if stop.at_once:
        raise Interrupted
    if failure.details:
        print_error(failure.details)
    restarts = "the one restart is" if plan.restarts == 1 else f"all {plan.restarts} restarts are"
    used_up = "" if failure.is_final or not plan.restarts else f"; {restarts} used up"
    _print_line(failure.summary + used_up)
    return failure.code


def _exit_disconnected(supervisor: Supervisor, plan: Launch, folder: Path) -> NoReturn:
    """Exit at once: a call over a cut cable may block for a quarter of an hour."""
    supervisor.kill()
    _print_line(
        f"--rendezvous {plan.rendezvous}: not reachable for {plan.rendezvous_timeout:g} s; the same command rejoins"
    )
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _print_line(text: str) -> None:
    """Print on a new line and show the cursor, which a killed process may have hidden."""
    start = "\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else ""
    print_error(f"{start}{text}")
