"""`kill -9` of a random process at a random instant, again and again: a run must end as if nothing had happened."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from pathlib import Path

from chaos.row import Row
from chaos.training import STEPS, Command, difference, send, undisturbed

_SECONDS_EACH = 25.0


def run(quick: bool) -> list[Row]:
    """Kills on two and on three processes."""
    numbers = {2: 2, 3: 2} if quick else {2: 60, 3: 40}
    generator = random.Random(7)
    with tempfile.TemporaryDirectory() as name:
        return [_trial(Path(name), procs, number, generator) for procs, number in numbers.items()]


def _trial(folder: Path, procs: int, number: int, generator: random.Random) -> Row:
    whole = undisturbed(folder, procs)
    good, longest, problems = 0, 0.0, []
    for attempt in range(number):
        command = Command(folder, f"killed-{procs}-{attempt}", procs)
        was_hit = _kill_one(command, generator)
        code = command.wait()
        longest = max(longest, command.seconds)
        problem = difference(whole, command) if code == 0 and was_hit else f"ended with {code}, hit: {was_hit}"
        good += problem is None
        problems += [f"{command.out.name}: {problem}"] if problem else []
    print("\n".join(problems))
    return Row(
        f"`kill -9` of a random rank of {procs} at a random instant",
        "weights, optimizer and metrics as in the uninterrupted run; at most 25 s each; no orphan, no temporary file",
        f"{good}/{number}, at most {longest:.0f} s each",
        good == number and longest <= _SECONDS_EACH,
    )


def _kill_one(command: Command, generator: random.Random) -> bool:
    """Kill one of the processes when a random share of the steps is done and a moment has passed."""
    wanted = int(generator.uniform(0.0, 0.98) * STEPS)
    command.wait_until(lambda: command.steps_done() >= wanted)
    time.sleep(generator.uniform(0.0, 0.05))
    return send(generator.choice(list(command.ranks().values())), signal.SIGKILL)
