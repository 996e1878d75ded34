"""A disk that is full for a while, under a real run: on a small file system of its own."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos.row import Row
from chaos.training import STEPS, Command, difference, last_of, send, undisturbed

_MEGABYTES = 6


def run(quick: bool) -> list[Row]:
    """Space that goes at a random instant, and comes back; and starts while there is none."""
    number = 1 if quick else 10
    generator = random.Random(17)
    cases = {
        (
            "no space left on the disk for a while",
            "the checkpoint before is whole, the run finishes, bit-identical",
        ): _fill,
        (
            "killed and started again on a full disk",
            "refused in a line; with space again it goes on, bit-identical",
        ): _restart,
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = undisturbed(folder, 2)
        for (fault, goal), trial in cases.items():
            problems = []
            for attempt in range(number):
                try:
                    with small_disk(folder / "disk") as disk:
                        problem = trial(disk, f"full-{attempt}", generator, whole)
                except PermissionError as error:
                    print(f"disk: left out, since a file system cannot be mounted here ({error})")
                    return [*rows, Row(fault, goal, "not tried: a file system cannot be mounted here", True)]
                problems += [f"{trial.__name__} {attempt}: {problem}"] if problem else []
            print("\n".join(problems))
            rows.append(Row(fault, goal, f"{number - len(problems)}/{number}", not problems))
    return rows


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of a few megabytes; PermissionError where none may be mounted."""
    path.mkdir(exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={_MEGABYTES}m", "paceline-chaos", str(path)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PermissionError(done.stderr.strip())
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _fill(disk: Path, out: str, generator: random.Random, whole: dict[str, str]) -> str | None:
    command = _started(disk, out, generator)
    filler = _fill_up(disk)
    filled_at = command.steps_done()
    command.wait_until(lambda: command.steps_done() >= filled_at + 25)  # at least two checkpoints fall into it
    went_on = command.steps_done() > filled_at
    time.sleep(generator.uniform(0.0, 0.5))
    filler.unlink()
    code = command.wait()
    if code != 0 or not went_on:
        return f"ended with {code}, went on meanwhile: {went_on}: {command.output()[-500:]}"
    return difference(last_of(whole), command)


def _restart(disk: Path, out: str, generator: random.Random, whole: dict[str, str]) -> str | None:
    command = _started(disk, out, generator)
    for pid in (command.process.pid, *command.ranks().values()):
        send(pid, signal.SIGKILL)
    command.wait()
    filler = _fill_up(disk)
    again = Command(disk, out, 2, log=disk.parent / f"{out}-on-full-disk.log")
    code, output = again.wait(), again.output()
    filler.unlink()
    if code != 1 or "Traceback" in output or "No space left" not in output:
        return f"on the full disk it ended with {code}: {output[-500:]}"
    last = Command(disk, out, 2)
    code = last.wait()
    return f"ended with {code}: {last.output()[-500:]}" if code else difference(last_of(whole), last)


def _started(disk: Path, out: str, generator: random.Random) -> Command:
    """A run that has done a random part of its steps."""
    command = Command(disk, out, 2)
    wanted = int(generator.uniform(0.1, 0.6) * STEPS)
    command.wait_until(lambda: command.steps_done() >= wanted)
    return command


def _fill_up(disk: Path) -> Path:
    """The file that takes all that was left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return filler
