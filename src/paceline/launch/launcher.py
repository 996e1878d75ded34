"""The launcher: this machine's processes of a run, started and kept alive by torch's elastic agent."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline.core.errors import PacelineError, Stopped
from paceline.core.place import HERE
from paceline.core.process import print_error, resume_gc
from paceline.core.temporary import temporary_folder
from paceline.core.text import pluralize
from paceline.launch.environment import LAUNCHER, threads_of_each
from paceline.launch.network import Endpoint, address_towards, use_interface_of, watch
from paceline.launch.signals import Interrupted, StopSignals

if TYPE_CHECKING:
    from paceline.launch.agent import Agent

_KILLED = 130
_FAREWELL_SECONDS = 5.0  # for the other machines to learn why a run has ended


@dataclass(frozen=True)
class Launch:
    """How many processes on how many machines; all times in seconds."""

    processes: int
    min_nodes: int = 1
    max_nodes: int = 1
    rendezvous: Endpoint | None = None
    rendezvous_timeout: float = 60.0
    restarts: int = 3
    patience: float = 60.0  # for processes to save their state and end after a request to stop


def worker_command(arguments: Sequence[str]) -> list[str]:
    """This command again, with the same arguments; the current folder is kept out of the import path."""
    return [sys.executable, "-P", "-m", "paceline", *arguments]


def launch(command: Sequence[str], plan: Launch) -> int:
    """Run the command in every process of the plan until all are done; the result is the exit code."""
    stop = StopSignals()
    try:
        with stop.installed(), temporary_folder() as folder:
            _prepare_environment(plan)
            return _supervise(command, plan, stop, folder)
    except Interrupted:
        assert stop.received
        _print_line("ended at once" if stop.at_once else f"stopped by {stop.received.name} before training began")
        return _KILLED if stop.at_once else Stopped.exit_code
    finally:
        os.environ.pop(LAUNCHER, None)


def _prepare_environment(plan: Launch) -> None:
    """What the processes inherit, unless the user has set it."""
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_each(plan.processes)))
    use_interface_of(address_towards(plan.rendezvous) if plan.rendezvous else HERE)
    # Torch's warnings of its own sockets, as of names that the name server does not know, help nobody.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Processes that share the agent's store hang or fail after a restart: what the earlier ones wrote is still there.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # The agent would raise an exception for a signal, and end with 1 whatever the processes have saved.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""


def _supervise(command: Sequence[str], plan: Launch, stop: StopSignals, folder: Path) -> int:
    # From here on torch is needed: it takes longer to import than everything before.
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousError

    from paceline.launch.agent import Agent, Outputs
    from paceline.launch.rendezvous import meet

    if plan.rendezvous:
        least = f"{plan.min_nodes} to " if plan.min_nodes < plan.max_nodes else ""
        _print_line(f"waiting for {least}{pluralize(plan.max_nodes, 'machine')} at {plan.rendezvous}")
    with stop.waiting():
        machines = meet(plan.rendezvous, plan.min_nodes, plan.max_nodes, plan.rendezvous_timeout)
    spec = WorkerSpec(
        role="default",
        local_world_size=plan.processes,
        rdzv_handler=machines.handler,
        entrypoint=command[0],
        args=tuple(argument.replace("$", "$$") for argument in command[1:]),  # the agent fills in templates
        max_restarts=plan.restarts,
        monitor_interval=0.1,
    )
    agent = Agent(spec, Outputs(folder), machines, stop, plan.patience, _print_line)
    resume_gc()
    if plan.rendezvous:
        watch(plan.rendezvous, plan.rendezvous_timeout, lambda: _end_cut_off(agent, plan, folder))
    try:
        agent.run()
        if agent.failure:
            machines.finish(_FAREWELL_SECONDS)
    except RendezvousError as error:
        if verdict := machines.verdict():  # of a machine that has ended the run since we were told to begin again
            _print_line(verdict.message)
            return verdict.code
        raise PacelineError(_rendezvous_problem(error, plan)) from error
    finally:
        machines.handler.shutdown()
    return _report(agent, plan, stop)


def _end_cut_off(agent: Agent, plan: Launch, folder: Path) -> NoReturn:
    """End in the middle of whatever goes on: an answer over a cut cable is waited for up to a quarter of an hour."""
    agent.kill()
    _print_line(
        f"--rendezvous {plan.rendezvous}: not reached for {plan.rendezvous_timeout:g} s; the same command joins again"
    )
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _report(agent: Agent, plan: Launch, stop: StopSignals) -> int:
    failure = agent.failure
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


def _rendezvous_problem(error: Exception, plan: Launch) -> str:
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

    if isinstance(error, RendezvousClosedError):
        return f"--rendezvous {plan.rendezvous}: this run has ended on the other machines"
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"--rendezvous {plan.rendezvous}: fewer than {pluralize(plan.min_nodes, 'machine')} came within "
            f"{plan.rendezvous_timeout:g} s; start the same command on each, or wait longer with --rendezvous-timeout"
        )
    return f"--rendezvous {plan.rendezvous}: the connection is lost; the machine that serves it may have ended"


def _print_line(text: str) -> None:
    """On a line of its own, with the cursor back: a process that was killed in mid-line has left both behind."""
    start = "\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else ""
    print_error(f"{start}{text}")
