"""`kill -9` of a random process at a random instant, again and again: a run must end as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from chaos.row import Row

_RECIPE = {
    "name": "killed",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4, 8]},
    "data": {
        "batch": 48,
        "train": {"dataset": "fashion_small", "split": "train", "transforms": [{"name": "flip"}]},
        "val": {"dataset": "fashion_small", "split": "test"},
    },
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "adamw", "lr": 0.003},
    "train": {"steps": 150, "averaging": {"name": "ema", "decay": 0.99}},
    "evaluate": {"every_steps": 50},
    "checkpoint": {"every_steps": 10},
    "observe": {"log_every_steps": 10, "pictures": False, "tensorboard": False},
}
_TIMEOUT = 120.0
_SECONDS_EACH = 25.0


def run(quick: bool) -> list[Row]:
    """Kills on two and on three processes."""
    numbers = {2: 2, 3: 2} if quick else {2: 60, 3: 40}
    generator = random.Random(7)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe.json").write_text(json.dumps(_RECIPE))
        return [_trial(folder, procs, number, generator) for procs, number in numbers.items()]


def _trial(folder: Path, procs: int, number: int, generator: random.Random) -> Row:
    whole, _ = _train(folder, "whole", procs, None, generator)
    good, worst, problems = 0, 0.0, []
    for attempt in range(number):
        out = f"killed-{procs}-{attempt}"
        found, seconds = _train(folder, out, procs, generator.uniform(0.0, 1.0), generator)
        worst = max(worst, seconds)
        problem = _problem(folder / out, whole, found)
        good += problem is None
        problems += [f"{out}: {problem}"] if problem else []
    print("\n".join(problems))
    return Row(
        f"`kill -9` of a random rank of {procs} at a random instant",
        "weights, optimizer and metrics as in the uninterrupted run; at most 25 s each; no orphan, no temporary file",
        f"{good}/{number}, at most {worst:.0f} s each",
        good == number and worst <= _SECONDS_EACH,
    )


def _train(
    folder: Path, out: str, procs: int, share: float | None, generator: random.Random
) -> tuple[dict[str, str], float]:
    """Train; kill one of the processes when that share of the steps is done and a moment has passed."""
    command = [sys.executable, "-m", "paceline", "train", "recipe.json", "--out", out, "--procs", str(procs)]
    started = time.monotonic()
    going = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if share is not None:
            _kill_one(folder / out, going.pid, share, generator)
        code = going.wait(_TIMEOUT)
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        going.kill()
    return {"code": str(code), **_bits(folder / out)}, time.monotonic() - started


def _kill_one(out: Path, launcher: int, share: float, generator: random.Random) -> None:
    wanted = int(share * _RECIPE["train"]["steps"])  # type: ignore[index]
    deadline = time.monotonic() + _TIMEOUT
    while _steps_done(out) < wanted and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(generator.uniform(0.0, 0.2))
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    with suppress(OSError, IndexError, ValueError):
        os.kill(int(generator.choice(children.read_text().split())), signal.SIGKILL)


def _steps_done(out: Path) -> int:
    from paceline.engine.heartbeat import read_beat

    beat = read_beat(out / "logs" / "heartbeats", 0)
    return beat.step if beat else -1


def _bits(out: Path) -> dict[str, str]:
    found = {}
    for path in sorted((out / "checkpoints").glob("step-*/*")):
        if path.suffix == ".safetensors":
            found[f"{path.parent.name}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    metrics = out / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    found["metrics"] = json.dumps([{name: value for name, value in line.items() if name != "clock"} for line in lines])
    return found


def _problem(out: Path, whole: dict[str, str], found: dict[str, str]) -> str | None:
    different = [name for name in whole if found.get(name) != whole[name]]
    if different:
        return f"differs in {', '.join(different[:3])}"
    left = [str(path) for path in out.rglob("*") if ".partial" in path.name or ".replaced" in path.name]
    return f"left {left[0]}" if left else None
