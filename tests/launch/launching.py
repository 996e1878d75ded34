"""Starts real launchers, whose processes run a small script, and looks at what is left of them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from support.forkserver import CONTEXT
from support.waiting import TIMEOUT

from paceline.core.errors import PacelineError
from paceline.launch.launcher import launch
from paceline.launch.machines import Launch

# What a test's processes begin with: their place, a way to say that they are there, and the errors of the package.
_OPENING = """
import os, signal, sys, time
from pathlib import Path
from paceline.core.errors import *
from paceline.core.process import STOP_SIGNALS
from paceline.launch.environment import restart_count
from paceline.launch.failure import run_as_worker
rank, world, start = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), restart_count()
def note(text):
    with open(f"rank-{rank}.notes", "a") as notes:
        notes.write(f"{text}\\n")
def wait_for(condition):
    while not condition():
        time.sleep(0.01)
def wait_for_all():
    wait_for(lambda: all(Path(f"rank-{each}.notes").exists() for each in range(world)))
"""
_CLOSING = "\nsys.exit(run_as_worker(body))\n"

_LAUNCH = """
import sys
from paceline.launch.launcher import launch
from paceline.launch.machines import Launch
from paceline.launch.network import Endpoint
sys.exit(launch({command!r}, {plan!r}))
"""


def write_worker(folder: Path, body: str) -> None:
    """A script whose function `body()` is what each process does; the result is its exit code."""
    (folder / "worker.py").write_text(_OPENING + textwrap.dedent(body) + _CLOSING)


def launcher(plan: Launch, command: list[str] | None = None) -> list[str]:
    """The command line of a launcher; its processes run the worker of the current folder by default."""
    return [sys.executable, "-c", _LAUNCH.format(plan=plan, command=command or [sys.executable, "worker.py"])]


def environment(**more: str) -> dict[str, str]:
    """Ours, without what would give a process a place already."""
    names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    return {name: value for name, value in os.environ.items() if name not in names} | more


@dataclass(frozen=True)
class Done:
    """A launcher that has ended."""

    returncode: int
    stdout: str
    stderr: str


class Going:
    """A launcher in a process of its own, forked from one that has imported torch already: that saves a second.

    Whatever a test finds, nothing of it is left behind the `with` that it is used in.
    """

    def __init__(self, folder: Path, plan: Launch, variables: dict[str, str]) -> None:
        self._folder = folder
        self._process = CONTEXT.Process(target=_launch, args=(folder, plan, variables))
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the launcher if it is still there, with the processes that it has started and all that those have."""
        if self._process.exitcode is not None:
            return
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        children = [int(child) for task in tasks for child in task.read_text().split()]
        self._process.kill()
        for child in children:
            with suppress(ProcessLookupError):  # each leads a group of its own
                os.killpg(child, signal.SIGKILL)
        self._process.join()

    def send_signal(self, number: int) -> None:
        assert self._process.pid
        os.kill(self._process.pid, number)

    def ends_within(self, seconds: float) -> bool:
        self._process.join(seconds)
        return self._process.exitcode is not None

    def wait(self) -> Done:
        assert self.ends_within(TIMEOUT), "the launcher does not end"
        assert self._process.exitcode is not None
        texts = [(self._folder / name).read_text() for name in ("launcher.out", "launcher.err")]
        return Done(self._process.exitcode, *texts)


def _launch(folder: Path, plan: Launch, variables: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for number, name in ((1, "launcher.out"), (2, "launcher.err")):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), number)
    tempfile.tempdir = None
    try:
        code = launch([sys.executable, "worker.py"], plan)
    except PacelineError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


def begin(folder: Path, body: str, plan: Launch | None = None, **more: str) -> Going:
    """Launch two processes, or what the plan says, and come back while they go on."""
    write_worker(folder, body)
    return Going(folder, plan or Launch(2), environment(**{"TMPDIR": str(folder)} | more))


def run(folder: Path, body: str, plan: Launch | None = None, **more: str) -> Done:
    """Launch to the end."""
    with begin(folder, body, plan, **more) as going:
        return going.wait()


def notes(folder: Path, rank: int) -> list[str]:
    """What a process has noted, over all starts."""
    path = folder / f"rank-{rank}.notes"
    return path.read_text().splitlines() if path.exists() else []


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
