"""`kill -9` of the launcher: its processes and their loader workers end with it, and the same command goes on."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from pathlib import Path

from chaos.row import Row
from chaos.training import Command, difference, send, undisturbed

_SHORT = ("train.steps=40", "evaluate.every_steps=20", "checkpoint.every_steps=10")
_LOADER = ("data.loader=process", "data.num_workers=2")
_MOST_SECONDS = 2.0
_LONGEST_SECONDS = 30.0


def run(quick: bool) -> list[Row]:
    """Kills at random instants, from the start of the processes on."""
    number = 2 if quick else 10
    generator = random.Random(17)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = undisturbed(folder, 2, *_SHORT, *_LOADER)
        good, longest, problems = 0, 0.0, []
        for attempt in range(number):
            seconds, problem = _kill(folder, f"killed-{attempt}", generator, whole)
            longest = max(longest, seconds)
            good += problem is None
            problems += [f"killed-{attempt}: {problem}"] if problem else []
    print("\n".join(problems))
    return [
        Row(
            "`kill -9` of the launcher of 2 ranks with 2 loader workers each, then started again",
            f"nothing of it runs {_MOST_SECONDS:g} s later; bit-identical at the end; no temporary folder is left",
            f"{good}/{number}, all gone after at most {longest:.1f} s",
            good == number and longest <= _MOST_SECONDS,
        )
    ]


def _kill(folder: Path, out: str, generator: random.Random, whole: dict[str, str]) -> tuple[float, str | None]:
    """How long its processes outlived a launcher, and what is wrong with the end of the run."""
    command = Command(folder, out, 2, *_SHORT, *_LOADER)
    command.wait_until(lambda: command.process.pid not in command.ranks().values())
    wanted = generator.randint(-1, 30)
    command.wait_until(lambda: command.steps_done() >= wanted)
    send(command.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    command.wait()
    while command.orphans() and time.monotonic() - killed < _LONGEST_SECONDS:
        time.sleep(0.05)
    seconds = time.monotonic() - killed
    again = Command(folder, out, 2, *_SHORT, *_LOADER)
    code = again.wait()
    return seconds, difference(whole, again) if code == 0 else f"ended with {code}: {again.output()}"
