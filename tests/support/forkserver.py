"""Commands and scripts in processes that are forked from one which has imported everything: a start takes no time.

They are processes as any other, with a folder, variables, standard streams and an exit code of their own. What is
decided while Python or torch is loaded is the same in all of them.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.waiting import TIMEOUT

Done = subprocess.CompletedProcess[str]

CONTEXT = multiprocessing.get_context("forkserver")
# One server forks for all tests of a process, and keeps what it has imported at its start.
CONTEXT.set_forkserver_preload(
    [
        *("paceline.cli", "paceline.recipe.build", "paceline.run.train", "paceline.engine.strategies.fsdp"),
        *("paceline.loggers.tensorboard", "tensorboard.compat.proto.event_pb2", "paceline.launch.supervisor"),
        *("torch._inductor.config", "torch._dynamo", "torch.utils.flop_counter", "matplotlib.pyplot", "PIL.Image"),
    ]
)
_PORTS = (20000, 32000)  # below those that systems give out on their own


def paceline(folder: Path, *words: str | Path, **variables: str) -> Done:
    """The command, in a folder."""
    (done,) = _run([folder], ["paceline", *map(str, words)], {**os.environ, **variables})
    return done


def paceline_ranks(procs: int, folder: Path, *words: str | Path, **variables: str) -> list[Done]:
    """The command in several processes that share a run, without a launcher."""
    return _run([folder] * procs, ["paceline", *map(str, words)], {**os.environ, **variables})


def paceline_apart(folders: list[Path], *words: str | Path) -> list[Done]:
    """The same, each process in a folder of its own: as on machines that see a shared disk at different times."""
    return _run(folders, ["paceline", *map(str, words)], os.environ)


def script_ranks(procs: int, path: Path, *words: str | Path, **variables: str) -> list[Done]:
    """A script in several processes that find each other."""
    return _run([path.parent] * procs, [str(path), *map(str, words)], {**os.environ, **variables})


class Running:
    """A command that was started in a process of its own, which leads a session if `session`."""

    def __init__(
        self, folder: Path, words: Sequence[str | Path], variables: Mapping[str, str], session: bool = False
    ) -> None:
        self._files = [tempfile.NamedTemporaryFile() for _ in range(2)]  # noqa: SIM115 - gone with this object
        self._words = list(map(str, words))
        names = [Path(file.name) for file in self._files]
        arguments = (folder, self._words, dict(variables), names, session)
        self._process = CONTEXT.Process(target=_main, args=arguments)
        self._process.start()
        atexit.register(self._process.kill)  # of a test that failed, say
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)

    def printed(self) -> list[str]:
        """What it has written to standard output and to standard error so far."""
        return [Path(file.name).read_text(encoding="utf-8") for file in self._files]

    def end(self) -> Done:
        """Wait for its end; the exit code, and what it has printed."""
        self._process.join(TIMEOUT)
        self._process.kill()
        self._process.join()
        return Done(self._words, self._process.exitcode or 0, *self.printed())


def _run(folders: list[Path], words: list[str], variables: Mapping[str, str]) -> list[Done]:
    """The command in a process for each folder."""
    procs, port = len(folders), _free_port()
    places = [{} if procs == 1 else _place(rank, procs, port) for rank in range(procs)]
    started = [Running(folder, words, {**variables, **place}) for folder, place in zip(folders, places, strict=True)]
    return [each.end() for each in started]


def _place(rank: int, procs: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": procs, "LOCAL_WORLD_SIZE": procs, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def _free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)):
                return port


def _main(folder: Path, words: list[str], variables: Mapping[str, str], files: list[Path], session: bool) -> None:
    if session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.path[:0] = [each for each in variables.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    sys.argv = words
    tempfile.tempdir = None
    if "OMP_NUM_THREADS" in variables:  # else read while torch is loaded
        import torch

        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    if words[0] == "paceline":
        from paceline.cli import main

        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
        if "RANK" in variables:
            os._exit(code)  # threads of gloo may still let go of tensors while the interpreter is taken down
        sys.exit(code)
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
