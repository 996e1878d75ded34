"""Timing whole processes, from before they start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import perf_counter

PACELINE = Path(sys.executable).with_name("paceline")


def seconds_to_exit(command: list[str], expected_code: int, folder: Path) -> float:
    """How long a command takes, run in `folder`."""
    begin = perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    seconds = perf_counter() - begin
    if done.returncode != expected_code:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}, not {expected_code}: {done.stderr}")
    return seconds


def seconds_to_report(script: Path, folder: Path) -> float:
    """How long until a script says `perf_counter`'s time; that clock is the same one in all processes."""
    begin = perf_counter()
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{script} ended with {done.returncode}: {done.stderr}")
    return float(done.stdout.split()[-1]) - begin
