"""Starts many short runs in one group of two processes; both files of tests about sharing look at what came out."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent / "scripts"
_SECONDS = 600  # far more than all runs take together on a busy machine
_LAUNCH = """
import sys
from paceline.launch.launcher import Launch, launch
sys.exit(launch([sys.executable, *sys.argv[1:]], Launch(2, restarts=0)))
"""


def environment(**more: str) -> dict[str, str]:
    """Ours, with the user's modules of the tests in reach, and without what a launcher decides."""
    path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return (
        {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"PYTHONPATH": path} | more
    )


def shared_runs() -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the runs, and what each of the two processes found."""
    out, problem = _run_once()
    assert not problem, problem
    return out, [json.loads((out / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@cache
def _run_once() -> tuple[Path, str]:
    """The folder of the runs and what went wrong, if anything: every test that needs them hears it at once."""
    out = Path(tempfile.mkdtemp(prefix="shared-runs-"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    command = [sys.executable, "-c", _LAUNCH, str(SCRIPTS / "shared_runs.py"), str(out)]
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        return out, f"the runs have not ended within {_SECONDS} s: {error.stderr!r}"
    return out, f"exit code {done.returncode}: {done.stderr}" if done.returncode else ""


def paceline(*words: str | Path) -> list[str]:
    """The command line of the real command, with the user's module of the tests."""
    return [sys.executable, "-m", "paceline", *map(str, words), "--use", "shared_parts"]
