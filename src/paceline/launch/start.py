"""The one question that a command asks before it needs torch: work here, or start processes that do?"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence

from paceline.core.errors import UsageError
from paceline.launch.devices import ONE_PROCESS, check_exist, default_processes, use_devices
from paceline.launch.environment import take_place
from paceline.launch.launcher import Launch, launch, worker_command
from paceline.launch.network import Endpoint

_FEW, _PER_CORE = 32, 4  # a slip of the keyboard must not start processes until memory is full


def share_out(
    options: argparse.Namespace, device: str, devices: Sequence[int] | None, strategy: str = "auto"
) -> int | None:
    """The exit code, once the processes that the options ask for have done the command; None: do it in this process.

    In a process that somebody else started, the options are not asked: it takes its place among the others.
    `options.device_mapping` tells then in words which devices are used, if the recipe names any.
    """
    place = take_place()
    if place is None:
        if device != "cpu":
            check_exist(devices)
        plan = read_plan(options, default_processes(device, devices, strategy))
        if strategy in ONE_PROCESS and (plan.processes > 1 or plan.rendezvous):
            raise UsageError(f"train.strategy {strategy} is for one process; use ddp, or leave out --procs and --nodes")
        if plan.processes > 1 or plan.rendezvous:
            return launch(worker_command(options.arguments), plan)
    num_processes = place.local_world if place else 1
    options.device_mapping = None if device == "cpu" else use_devices(devices, num_processes, strategy)
    return None


def read_plan(options: argparse.Namespace, default: int) -> Launch:
    """The launch that a command's options describe."""
    processes = default if options.procs is None else options.procs
    most = max(_FEW, _PER_CORE * (os.cpu_count() or 1))
    if not 1 <= processes <= most:
        raise UsageError(f"--procs: expected a number from 1 to {most} on this machine, got {processes}")
    if options.restarts < 0:
        raise UsageError(f"--restarts: expected a number from 0 up, got {options.restarts}")
    if options.nodes is None and options.rendezvous is None:
        return Launch(processes, restarts=options.restarts)
    if options.nodes is None or options.rendezvous is None:
        raise UsageError("--nodes and --rendezvous belong together, as in --nodes 2 --rendezvous HOST:29400")
    if options.rendezvous_timeout <= 0:
        raise UsageError(f"--rendezvous-timeout: expected seconds > 0, got {options.rendezvous_timeout:g}")
    least, most = read_nodes(options.nodes)
    endpoint = Endpoint.parse(options.rendezvous)
    return Launch(processes, least, most, endpoint, options.rendezvous_timeout, options.restarts)


def read_nodes(text: str) -> tuple[int, int]:
    """From `2` or `1:4`: the least and the greatest number of machines."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--nodes: expected a number of machines or MIN:MAX, as in 2 or 1:4, got {text!r}")
    return least, most
