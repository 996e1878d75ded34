"""Kills and requests to stop at random instants of evaluations, and requests that reach the loader's processes too."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from chaos.row import Row
from chaos.training import Command, difference, records, saved_step, send, undisturbed
from paceline.loggers.files import read_starts

_EX_TEMPFAIL = 75
_STEPS = (4, 8, 12)
"""Behind which there is an evaluation, of a second or more."""
_WORDS = (
    *(f"train.steps={_STEPS[-1]}", "evaluate.every_steps=4", "evaluate.batch_size=8"),
    *("checkpoint.every_steps=3", "checkpoint.keep_last=9", "logging.every_steps=2"),
)
_ENDLESS = (
    *("train.steps=100000", "evaluate.every_steps=100000", "checkpoint.every_steps=100000"),
    *("data.loader=process", "data.num_workers=2"),
)

Disturb = Callable[[Command, random.Random], None]


def run(quick: bool) -> list[Row]:
    """Kills and requests on one process and on two; then requests to all processes of a run with loader processes."""
    generator = random.Random(13)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for procs in (1, 2):
            trial = _Trial(Path(name), procs, 1 if quick else 4, generator)
            rows.append(trial.row("`kill -9`", "a rank of ", "", _kill))
            rows.append(trial.row("SIGTERM", "the launcher or a rank of ", "exit 75, status stopped, ", _request_stop))
        rows.append(_ask_groups(Path(name), 2 if quick else 20, generator))
    return rows


class _Trial:
    """Runs on a number of processes, disturbed in each of their evaluations and compared with one that was not."""

    def __init__(self, folder: Path, procs: int, num_runs: int, generator: random.Random) -> None:
        self.folder, self.procs, self.num_runs, self.generator = folder, procs, num_runs, generator
        self.whole = undisturbed(folder, procs, *_WORDS)
        evaluations = [each for each in records(folder / f"whole-{procs}") if each["split"] == "val"]
        self.seconds = min(each["clock"]["seconds"] for each in evaluations)

    def row(self, what: str, whom: str, start: str, disturb: Disturb) -> Row:
        """What became of the runs."""
        good, number, problems = 0, 0, []
        for attempt in range(self.num_runs):
            out = f"{disturb.__name__}-{self.procs}-{attempt}"
            steps, problem = self._disturbed(out, disturb)
            good, number = good + (len(steps) if problem is None else 0), number + len(steps)
            problems += [f"{out}: {problem}"] if problem else []
        print("\n".join(problems))
        target = f"{whom}{self.procs}" if self.procs > 1 else "one process"
        return Row(
            f"{what} to {target} at a random instant of an evaluation",
            f"{start}no step lost, the evaluation is done first afterwards, bit-identical at the end",
            f"{good}/{number}",
            good == number > self.num_runs,
        )

    def _disturbed(self, out: str, disturb: Disturb) -> tuple[list[int], str | None]:
        """The steps behind which a run was disturbed in its evaluation, and what went wrong, if anything."""
        command, steps = self._start(out), []
        for step in _STEPS:
            command.wait_until(lambda command=command, step=step: saved_step(command.out) >= step)  # type: ignore[misc]
            time.sleep(self.generator.uniform(0.0, 0.8 * self.seconds))
            if _is_evaluated(command, step):
                continue  # faster than that of the run that was not disturbed
            steps.append(step)
            disturb(command, self.generator)
            if disturb is _kill and self.procs > 1:
                continue  # the launcher starts it again
            code = command.wait()
            if code != (-signal.SIGKILL if disturb is _kill else _EX_TEMPFAIL):
                return steps, f"ended with {code}"
            if disturb is _request_stop and _status(command) != ("stopped", step):
                return steps, f"the status is {_status(command)}, expected stopped at step {step}"
            command = self._start(out)
        code = command.wait()
        starts = [each["step"] for each in read_starts(command.out / "logs" / "starts.jsonl") if "state" not in each]
        lost = [step for step in steps if step not in starts]
        if code or lost:
            return steps, f"ended with {code}, did not go on after steps {lost}"
        return steps, difference(self.whole, command)

    def _start(self, out: str) -> Command:
        return Command(self.folder, out, self.procs, *_WORDS)


def _kill(command: Command, generator: random.Random) -> None:
    send(generator.choice(list(command.ranks().values())), signal.SIGKILL)


def _request_stop(command: Command, generator: random.Random) -> None:
    send(generator.choice([command.process.pid, *command.ranks().values()]), signal.SIGTERM)


def _is_evaluated(command: Command, step: int) -> bool:
    return any(each["split"] == "val" and each["step"] == step for each in records(command.out))


def _status(command: Command) -> tuple[str, int]:
    status = json.loads((command.out / "status.json").read_text())
    return status["state"], status["step"]


def _ask_groups(folder: Path, number: int, generator: random.Random) -> Row:
    good, problems = 0, []
    for attempt in range(number):
        command = Command(folder, f"group-{attempt}", 1, *_ENDLESS)
        command.wait_until(command.has_recorded)
        time.sleep(generator.uniform(0.0, 1.0))
        os.killpg(command.process.pid, signal.SIGTERM)
        code = command.wait()
        is_good = code == _EX_TEMPFAIL and _status(command) == ("stopped", saved_step(command.out))
        good += is_good
        problems += [] if is_good else [f"{command.out.name}: ended with {code}: {command.output()[-300:]}"]
        if orphans := command.orphans():
            problems.append(f"{command.out.name}: left the processes {orphans}")
    print("\n".join(problems))
    return Row(
        "SIGTERM to the whole process group of a run with 2 loader processes",
        "exit 75, a checkpoint at the last step, no orphan",
        f"{good}/{number}",
        good == number and not problems,
    )
