"""SIGTERM to one process of several: all save at the same step, and the next start goes on from there."""

from __future__ import annotations

import random
import signal
import tempfile
from pathlib import Path

from chaos.row import Row
from chaos.training import STEPS, Command, difference, last_of, send, undisturbed

_EX_TEMPFAIL = 75


def run(quick: bool) -> list[Row]:
    """Requests at random instants, on two processes."""
    number = 2 if quick else 20
    generator = random.Random(11)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = undisturbed(folder, 2)
        good, latest, problems = 0, 0, []
        for attempt in range(number):
            late, problem = _request_stop(folder, f"asked-{attempt}", generator, whole)
            latest = max(latest, late)
            good += problem is None
            problems += [f"asked-{attempt}: {problem}"] if problem else []
    print("\n".join(problems))
    return [
        Row(
            "SIGTERM to one rank of 2 at a random instant, then started again",
            "exit 75, saved at most one step later, no step lost, bit-identical at the end",
            f"{good}/{number}, saved at most {latest} step later",
            good == number and latest <= 1,
        )
    ]


def _request_stop(folder: Path, out: str, generator: random.Random, whole: dict[str, str]) -> tuple[int, str | None]:
    """How many steps were begun and done between the signal and the save, and what went wrong."""
    command = Command(folder, out, 2)
    wanted = int(generator.uniform(0.05, 0.9) * STEPS)
    command.wait_until(lambda: command.steps_done() >= wanted)
    asked_at = command.steps_done()
    send(generator.choice(list(command.ranks().values())), signal.SIGTERM)
    code = command.wait()
    if code != _EX_TEMPFAIL:
        return 0, f"ended with {code}, expected {_EX_TEMPFAIL}"
    saved = max(int(path.name[5:]) for path in (command.out / "checkpoints").glob("step-*"))
    again = Command(folder, out, 2)
    if again.wait() != 0:
        return 0, "could not go on"
    # The update that was under way when the signal came is finished first: that one is not late.
    return max(0, saved - asked_at - 1), difference(last_of(whole), again)
