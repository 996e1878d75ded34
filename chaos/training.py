"""Real runs of the command to be disturbed: started, watched through their heartbeats, and compared bit by bit."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.engine.watchdog import read_beat

STEPS = 150
RECIPE: dict[str, Any] = {
    "name": "disturbed",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4, 8]},
    "data": {
        "batch_size": 48,
        "train": {"dataset": "fashion_small", "split": "train", "transforms": [{"name": "random_horizontal_flip"}]},
        "val": {"dataset": "fashion_small", "split": "test"},
    },
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "adamw", "lr": 0.003},
    "train": {"steps": STEPS, "averaging": {"name": "ema", "decay": 0.99}},
    "evaluate": {"every_steps": 50},
    "checkpoint": {"every_steps": 10},
    "logging": {"every_steps": 10, "images": False, "tensorboard": False},
}
LONGEST = 120.0
"""Seconds after which a run counts as stuck."""


_WITHOUT_STREAMS = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")


class Command:
    """`paceline train` on the recipe in a folder, going on in the background."""

    def __init__(
        self,
        folder: Path,
        out: str,
        procs: int,
        *words: str,
        log: Path | None = None,
        has_streams: bool = True,
        **variables: str,
    ) -> None:
        (folder / "recipe.json").write_text(json.dumps(RECIPE))
        self.out, self.mark, self.begun = folder / out, f"CHAOS={uuid.uuid4().hex}", time.monotonic()
        name, value = self.mark.split("=")
        self.log, self.temporary = log or folder / f"{out}.log", folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "paceline",
            "train",
            "recipe.json",
            "--out",
            out,
            "--procs",
            str(procs),
            *words,
        ]
        with self.log.open("a") as file:
            self.process = subprocess.Popen(
                [*([] if has_streams else _WITHOUT_STREAMS), *command],
                cwd=folder,
                env={**os.environ, "TMPDIR": str(self.temporary), **variables, name: value},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait(self) -> int:
        """How it ends; -1 if it never does."""
        try:
            return self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            self.seconds = time.monotonic() - self.begun
            self.process.kill()

    def ranks(self) -> dict[int, int]:
        """The process ids of its processes, by rank; the launcher itself where it is alone."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found: dict[int, int] = {}
        for child in children.read_text().split() if children.exists() else []:
            variables = _environment(int(child))
            found |= {int(each[5:]): int(child) for each in variables if each.startswith(b"RANK=")}
        return found or {0: self.process.pid}

    def steps_done(self) -> int:
        """The update that the first process is at; -1 before it began."""
        beat = read_beat(self.out / "logs" / "heartbeats", 0)
        return beat.step if beat else -1

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Look again and again, as long as it goes on."""
        deadline = time.monotonic() + LONGEST
        while not is_so() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)

    def has_recorded(self) -> bool:
        """Whether there is any metric of it."""
        return bool(records(self.out))

    def output(self) -> str:
        """All that it printed."""
        return self.log.read_text()

    def orphans(self) -> list[int]:
        """Processes of it that are still there."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if self.mark.encode() in _environment(pid)]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def send(pid: int, number: signal.Signals) -> bool:
    """Whether the process was there to be sent the signal."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def bits(out: Path) -> dict[str, str]:
    """What must not depend on any disturbance: hashes of the checkpoints' tensors, and the metrics."""
    found = {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((out / "checkpoints").glob("step-*/*.safetensors"))
    }
    lines = [{name: value for name, value in line.items() if name != "clock"} for line in records(out)]
    return {**found, "metrics": json.dumps(lines)}


def records(out: Path) -> list[dict[str, Any]]:
    """The metrics that a run has recorded so far."""
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def saved_step(out: Path) -> int:
    """The step of the newest checkpoint; 0 before there is one."""
    return max((int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")), default=0)


def last_of(whole: dict[str, str]) -> dict[str, str]:
    """The last checkpoint and the metrics: others are not kept where a run has saved at further steps."""
    return {name: value for name, value in whole.items() if name == "metrics" or f"{STEPS:08d}" in name}


def difference(whole: dict[str, str], command: Command) -> str | None:
    """What is wrong with the end of a disturbed run, if anything."""
    found = bits(command.out)
    different = [name for name in whole if found.get(name) != whole[name]]
    if different:
        return f"differs in {', '.join(different[:3])}"
    left = [str(path) for path in command.out.rglob("*") if ".partial" in path.name or ".replaced" in path.name]
    left += [str(path) for path in command.temporary.iterdir() if path.name.startswith(("paceline-", "pymp-"))]
    if left:
        return f"left {left[0]}"
    return f"left the processes {orphans}" if (orphans := command.orphans()) else None


def undisturbed(folder: Path, procs: int, *words: str) -> dict[str, str]:
    """The bits of a run that nothing happens to."""
    command = Command(folder, f"whole-{procs}", procs, *words)
    code = command.wait()
    if code != 0:
        raise RuntimeError(f"the undisturbed run ended with {code}: {command.output()}")
    return bits(command.out)
