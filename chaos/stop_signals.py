"""Requests to stop as terminals, schedulers and systemd make them: to all processes, repeated, without streams."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from chaos.row import Row
from chaos.training import Command, saved_step

_EX_TEMPFAIL = 75
_ENDLESS = ("train.steps=100000", "evaluate.every_steps=100000", "checkpoint.every_steps=100000")
_LOADER = ("data.loader=process", "data.num_workers=1")


def _send(number: signal.Signals, times: int = 1) -> Callable[[Command], None]:
    """Send a signal to all processes of a command, so many times or until it has ended."""

    def send(command: Command) -> None:
        for _ in range(times):
            if command.process.poll() is not None:
                return
            os.killpg(command.process.pid, number)
            time.sleep(0.003)

    return send


WAYS: dict[str, tuple[Callable[[Command], None], bool]] = {
    "SIGHUP to all processes": (_send(signal.SIGHUP), True),
    "SIGTERM to all processes again and again": (_send(signal.SIGTERM, 100_000), True),
    "SIGTERM to all processes of a run without standard streams": (_send(signal.SIGTERM), False),
}
"""What is done, and whether the run has standard streams."""


def run(quick: bool) -> list[Row]:
    """Every way, on one process and on two, with loader processes; at random instants from the first step on."""
    generator = random.Random(29)
    with tempfile.TemporaryDirectory() as name:
        return [_trial(Path(name), way, 1 if quick else 5, generator) for way in WAYS]


def _trial(folder: Path, way: str, number: int, generator: random.Random) -> Row:
    send, has_streams = WAYS[way]
    problems, count = [], 0
    for procs in (1, 2):
        for attempt in range(number):
            out = f"{list(WAYS).index(way)}-{procs}-{attempt}"
            command = Command(folder, out, procs, *_ENDLESS, *_LOADER, has_streams=has_streams)
            problem = _stopped(command, send, generator.uniform(0.0, 1.0))
            problems += [f"{way}: {out}: {problem}"] if problem else []
            count += 1
    print("\n".join(problems))
    return Row(
        f"{way}, 1 and 2 ranks with a loader process each",
        "exit 75, a checkpoint at the last step, no orphan, no traceback",
        f"{count - len(problems)}/{count}",
        not problems,
    )


def _stopped(command: Command, send: Callable[[Command], None], seconds: float) -> str | None:
    """What is wrong with the end of a run that was asked to stop, if anything."""
    command.wait_until(command.has_recorded)
    time.sleep(seconds)
    sender = threading.Thread(target=send, args=(command,))
    sender.start()
    code = command.wait()
    sender.join()
    status = json.loads((command.out / "status.json").read_text())
    found = (code, status["state"], status["step"])
    if found != (_EX_TEMPFAIL, "stopped", saved_step(command.out)):
        return f"ended with {found}, saved step {saved_step(command.out)}: {command.output()[-500:]}"
    if "Traceback" in command.output():
        return command.output()[-1000:]
    return f"left the processes {orphans}" if (orphans := command.orphans()) else None
