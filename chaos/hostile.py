"""Hostile files, tried: all in one process that is watched, and some with the command itself."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos.hostile_files import CANARY, CASES, Case
from chaos.row import Row

MOST_MEGABYTES = 1024
SECONDS = 60
"""What any of them may take."""
AS_COMMANDS = ("a pipe as a recipe", "a pickle as .pth", "a zip bomb as weights", "a pipe as an image")


@dataclass(frozen=True)
class Outcome:
    """What became of a hostile file."""

    name: str
    expected: int
    code: int
    output: str
    seconds: float
    megabytes: float
    """The most memory that the process used."""
    was_executed: bool

    @property
    def problem(self) -> str:
        """What is wrong with it, if anything is."""
        if self.was_executed:
            return "something in it was executed"
        if self.code != self.expected:
            return f"exit code {self.code} instead of {self.expected}: {self.output[-2000:]}"
        lines = self.output.strip().splitlines()
        if len(lines) != 1 and not (self.code == 2 and 1 <= len(lines) <= 101):  # a recipe has a line for each mistake
            return f"not refused in a sentence: {self.output[:2000]}"
        if max(map(len, lines)) > 1000:
            return f"a sentence of {max(map(len, lines)):,} characters: {self.output[:200]}"
        return f"{self.megabytes:.0f} MB of memory" if self.megabytes > MOST_MEGABYTES else ""


# Starts a command and tells how much memory it took at most, apart from what other children of ours did.
_MEASURED = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def try_here(case: Case, folder: Path) -> Outcome:
    """Try one in this process."""
    from paceline.cli import main

    folder.mkdir()
    os.chdir(folder)
    output = io.StringIO()
    arguments = case.make()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # count memory from here
    started = time.monotonic()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
            code = main(arguments)
    except BaseException:  # noqa: BLE001 - whatever it is, it is what is looked for
        code = -1
        output.write(traceback.format_exc())
    finally:
        signal.alarm(0)
    seconds = time.monotonic() - started
    status = Path("/proc/self/status").read_text(encoding="ascii")
    megabytes = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return Outcome(case.name, case.code, code, output.getvalue(), seconds, megabytes, CANARY.exists())


def try_command(case: Case, folder: Path) -> Outcome:
    """Try one as a user would."""
    folder.mkdir()
    arguments = _made_in(case, folder)
    command = [sys.executable, "-c", _MEASURED, sys.executable, "-P", "-m", "paceline", *arguments]
    started = time.monotonic()
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    seconds = time.monotonic() - started
    megabytes = int(process.stdout.split()[-1]) / 1024
    executed = (folder / CANARY).exists()
    return Outcome(case.name, case.code, process.returncode, process.stderr, seconds, megabytes, executed)


def _made_in(case: Case, folder: Path) -> list[str]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return case.make()
    finally:
        os.chdir(before)


def try_all(names: set[str] | None = None) -> list[Outcome]:
    """Try all, or those of these names, in one other process, so that its memory tells about nothing else."""
    selected = [case.name for case in CASES if names is None or case.name in names]
    folder = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory(prefix="paceline-hostile-") as place:
        command = [sys.executable, "-m", "chaos.hostile", place, *selected]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_CACHE": f"{place}/cache"}
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=600, check=False, env=variables
        )
    outcomes = [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]
    if len(outcomes) != len(selected):
        raise RuntimeError(f"ended with {done.returncode} at {selected[len(outcomes)]}: {done.stderr[-3000:]}")
    return outcomes


def run(quick: bool) -> list[Row]:
    """All in one process, and some as commands."""
    outcomes = try_all()
    with tempfile.TemporaryDirectory(prefix="paceline-hostile-") as place:
        commands = [case for case in CASES if not quick and case.name in AS_COMMANDS]
        outcomes += [try_command(case, Path(place, str(number))) for number, case in enumerate(commands)]
    problems = [f"{outcome.name}: {outcome.problem}" for outcome in outcomes if outcome.problem]
    for problem in problems:
        print(problem)
    refused, total = len(outcomes) - len(problems), len(outcomes)
    memory, slowest = max(each.megabytes for each in outcomes), max(outcomes, key=lambda each: each.seconds)
    executed = sum(each.was_executed for each in outcomes)
    measured = f"{refused}/{total} refused, {executed} executed, {memory:.0f} MB, slowest {slowest.seconds:.1f} s"
    return [Row("hostile files", "all refused, nothing executed, < 1 GB memory", measured, not problems)]


def _give_up(*_: object) -> None:
    raise TimeoutError(f"not done after {SECONDS} s")


def _try_named(place: Path, names: list[str]) -> None:
    signal.signal(signal.SIGALRM, _give_up)
    answers = sys.stdout
    cases = {case.name: case for case in CASES}
    for number, name in enumerate(names):
        outcome = try_here(cases[name], place.absolute() / str(number))
        print(json.dumps(asdict(outcome)), file=answers, flush=True)


if __name__ == "__main__":
    _try_named(Path(sys.argv[1]), sys.argv[2:])
