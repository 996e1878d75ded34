"""Jobs side by side on this machine: each in a process of its own, with its share of cores and devices."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

from paceline.core.process import own_cores
from paceline.launch.environment import PARENT, threads_of_each

_STOP_SECONDS = 60.0  # for a job to save and exit after a request to stop

Thing = TypeVar("Thing")


class JobPool:
    """Runs up to `size` jobs at once, each of so many processes; they end with this process, whatever ends it.

    Use it from the main thread: on Linux a job ends with the thread that started it.
    """

    def __init__(self, size: int, devices: Sequence[str] = (), processes: int = 1) -> None:
        self.size, self._processes = size, processes
        self._devices = devices
        self._cores = own_cores()
        self._running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
        self._deadline: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    @property
    def num_running(self) -> int:
        """How many jobs run."""
        return len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether another job may start."""
        return len(self._running) < self.size

    @property
    def is_stopping(self) -> bool:
        """Whether the jobs were asked to stop."""
        return self._deadline is not None

    def start(self, name: str, command: Sequence[str], log: Path) -> None:
        """Start a job in the first free place; what it prints is appended to the log."""
        place = next(place for place in range(self.size) if place not in self._running)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=os.environ | self.variables(place),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a terminal's Ctrl-C is passed on once, by us
            )
        if self._cores:
            with suppress(OSError):  # it has ended already
                os.sched_setaffinity(process.pid, share_of(self._cores, place, self.size))
        self._running[place] = name, process

    def variables(self, place: int) -> Mapping[str, str]:
        """What the environment of a job in a place has beyond ours."""
        found = {PARENT: str(os.getpid())}
        if "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(threads_of_each(self.size * self._processes))
        if self._devices:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(share_of(self._devices, place, self.size))
        return found

    def poll(self) -> list[tuple[str, int]]:
        """The names of the jobs that have ended since, with their exit codes; a negative one is a signal."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._kill()
        ended = [place for place, (_, process) in self._running.items() if process.poll() is not None]
        return [(name, process.returncode) for name, process in map(self._running.pop, ended)]

    def stop(self) -> None:
        """Ask all jobs to save and exit; those that have not after a minute are killed."""
        self._deadline = time.monotonic() + _STOP_SECONDS
        for _, process in self._running.values():
            process.terminate()

    def _kill(self) -> None:
        for _, process in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for _, process in self._running.values():
            process.wait()


def share_of(things: Sequence[Thing], place: int, size: int) -> Sequence[Thing]:
    """The things of one of `size` places: contiguous and disjoint, or one that several share if there are too few."""
    if len(things) < size:
        return [things[place % len(things)]]
    return things[len(things) * place // size : len(things) * (place + 1) // size]
