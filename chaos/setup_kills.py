"""`kill -9` of a rank while the processes of a run are being set up, and again while they come back."""

from __future__ import annotations

import math
import os
import random
import signal
import tempfile
from pathlib import Path

from chaos.row import Row
from chaos.training import Command, difference, send, undisturbed

_PROCS = 2
_SHORT = ("train.steps=20", "evaluate.every_steps=10", "checkpoint.every_steps=5")  # what is tried comes before them


def run(quick: bool) -> list[Row]:
    """One kill, and two in a row."""
    numbers = {1: 4, 2: 2} if quick else {1: 20, 2: 10}
    generator = random.Random(13)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, seconds = undisturbed(folder, _PROCS, *_SHORT), _setup_seconds(folder)
        return [_trial(folder, whole, seconds, kills, number, generator) for kills, number in numbers.items()]


def _trial(
    folder: Path, whole: dict[str, str], seconds: float, kills: int, number: int, generator: random.Random
) -> Row:
    good, problems = 0, []
    for attempt in range(number):
        command = Command(folder, f"killed-{kills}-{attempt}", _PROCS, *_SHORT)
        hits = _kill(command, kills, seconds, generator)
        code = command.wait()
        problem = difference(whole, command) if code == 0 and hits == kills else f"ended with {code}, {hits} hits"
        good += problem is None
        problems += [f"{command.out.name}: {problem}\n{command.output()}"] if problem else []
    print("\n".join(problems))
    again = " and of another while the group comes back" if kills > 1 else ""
    return Row(
        f"`kill -9` of a random rank of {_PROCS} during set-up{again}",
        "the group starts again; exit 0; weights, optimizer and metrics as in the uninterrupted run",
        f"{good}/{number}",
        good == number,
    )


def _kill(command: Command, kills: int, seconds: float, generator: random.Random) -> int:
    """Kill a random rank of each start at a random instant of its set-up; how many were there to be killed."""
    hits, known = 0, set[int]()
    for _ in range(kills):
        command.wait_until(lambda: len(_ranks(command) - known) == _PROCS)
        ranks = sorted(_ranks(command) - known)
        known.update(ranks)
        hits += bool(ranks) and _kill_after(command, generator.choice(ranks), generator.uniform(0.0, seconds))
    return hits


def _kill_after(command: Command, rank: int, seconds: float) -> bool:
    """Kill a process once it has computed for so long, at the latest when training begins; whether it was there."""
    command.wait_until(lambda: _cpu_seconds(rank) >= seconds or command.steps_done() >= 0)
    return send(rank, signal.SIGKILL)


def _setup_seconds(folder: Path) -> float:
    """What a process computes from its start to the first step; how long that takes, others on the machine decide."""
    command = Command(folder, "timed", _PROCS, *_SHORT)
    command.wait_until(lambda: command.steps_done() >= 0)
    seconds = min(map(_cpu_seconds, _ranks(command)))
    command.wait()
    return seconds


def _ranks(command: Command) -> set[int]:
    return set(command.ranks().values()) - {command.process.pid}


def _cpu_seconds(pid: int) -> float:
    """What a process has computed so far; more than any, once it is gone."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return math.inf
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
