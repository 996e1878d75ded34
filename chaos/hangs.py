"""A process that stands still (SIGSTOP): it is named, and the group starts again in time."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from pathlib import Path

from chaos.row import Row
from chaos.training import STEPS, Command, difference, send, undisturbed

_TIMEOUT, _SECONDS_MORE = 5, 5.0


def run(quick: bool) -> list[Row]:
    """Processes of two and three that stop at random instants."""
    numbers = {2: 1} if quick else {2: 6, 3: 4}
    generator = random.Random(13)
    good, slowest, problems = 0, 0.0, []
    with tempfile.TemporaryDirectory() as name:
        for procs, number in numbers.items():
            whole = undisturbed(Path(name), procs, f"train.hang_seconds={_TIMEOUT}")
            for attempt in range(number):
                command = Command(Path(name), f"hung-{procs}-{attempt}", procs, f"train.hang_seconds={_TIMEOUT}")
                rank, seconds = _stop_one(command, generator)
                code = command.wait()
                named = f"process {rank}" in command.output() or f"rank {rank}" in command.output()
                problem = difference(whole, command) if code == 0 and named else f"ended with {code}, named: {named}"
                slowest = max(slowest, seconds)
                good += problem is None
                problems += [f"{command.out.name}: {problem}"] if problem else []
    print("\n".join(problems))
    number = sum(numbers.values())
    return [
        Row(
            f"a rank stands still (SIGSTOP), `train.hang_seconds` {_TIMEOUT}",
            f"named, started again within {_TIMEOUT} + {_SECONDS_MORE:.0f} s, bit-identical at the end",
            f"{good}/{number}, started again after at most {slowest:.1f} s",
            good == number and slowest <= _TIMEOUT + _SECONDS_MORE,
        )
    ]


def _stop_one(command: Command, generator: random.Random) -> tuple[int, float]:
    """The rank that was stopped, and how long it took until there were new processes."""
    wanted = int(generator.uniform(0.1, 0.9) * STEPS)
    command.wait_until(lambda: command.steps_done() >= wanted)
    ranks = command.ranks()
    rank = generator.choice(list(ranks))
    send(ranks[rank], signal.SIGSTOP)
    begun = time.monotonic()
    old = set(ranks.values())
    command.wait_until(lambda: len(new := set(command.ranks().values())) == len(old) and new.isdisjoint(old))
    return rank, time.monotonic() - begun
