"""Files that `paceline eject` writes, killed at a random instant and started again: the bits must be the recipe's."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chaos.row import Row
from chaos.training import LONGEST, records

_STEPS = 40
_WORDS = [
    *("train.epochs=null", f"train.steps={_STEPS}", "schedule.warmup_epochs=null", "schedule.warmup_steps=5"),
    *("evaluate.every_epochs=null", "evaluate.every_steps=15", "logging.every_steps=5"),
    *("checkpoint.every_epochs=null", "checkpoint.every_steps=5"),
]
_SAMPLES = ("classification", "detection", "keypoints", "saliency", "segmentation", "video")


def run(quick: bool) -> list[Row]:
    """Quickstart and the recipes for sample data, on one process and on two."""
    names = ["quickstart", *(f"{task}_sample" for task in _SAMPLES)]
    generator = random.Random(11)
    with tempfile.TemporaryDirectory() as name:
        return [_trial(Path(name), names[: 2 if quick else None], procs, generator) for procs in (1, 2)]


def _trial(folder: Path, names: list[str], procs: int, generator: random.Random) -> Row:
    problems = [f"{name}: {problem}" for name in names if (problem := _problem(folder, name, procs, generator))]
    print("\n".join(problems))
    processes = "1 process" if procs == 1 else f"{procs} processes"
    return Row(
        f"`kill -9` of an ejected file on {processes} at a random instant, for each recipe with sample data",
        "weights and metrics as those of the recipe, which nobody killed",
        f"{len(names) - len(problems)}/{len(names)}",
        not problems,
    )


def _problem(folder: Path, name: str, procs: int, generator: random.Random) -> str | None:
    paceline, out = [sys.executable, "-m", "paceline"], folder / f"{name}-{procs}"
    if name != "quickstart" and not (folder / "data" / name).is_dir():
        _run(folder, *paceline, "sample", name.removesuffix("_sample"), f"data/{name}")
    _run(folder, *paceline, "train", name, *_WORDS, "--out", f"{out}-recipe", "--procs", str(procs))
    file = out.with_suffix(".py")
    file.write_text(_run(folder, *paceline, "eject", name, *_WORDS), encoding="utf-8")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(procs)] if procs > 1 else []
    command = [sys.executable, *ranks, str(file), "--out", f"{out}-file"]
    _kill(folder, command, Path(f"{out}-file/checkpoints"), generator)
    _run(folder, *command)
    whole, killed = Path(f"{out}-recipe"), Path(f"{out}-file")
    if _digests(whole) != _digests(killed):
        return "other weights"
    return None if _metrics(whole) == _metrics(killed) else "other metrics"


def _run(folder: Path, *command: str) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=LONGEST).stdout


def _kill(folder: Path, command: list[str], checkpoints: Path, generator: random.Random) -> None:
    """Start a command and kill all of its processes once it has saved as often as a random number says."""
    step = generator.randrange(5, _STEPS, 5)
    process = subprocess.Popen(
        command, cwd=folder, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + LONGEST
    while not (checkpoints / f"step-{step:08d}").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(generator.uniform(0.0, 0.05))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _digests(run: Path) -> list[str]:
    files = sorted(max(run.glob("checkpoints/step-*")).glob("model*"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "clock"} for record in records(run)]
