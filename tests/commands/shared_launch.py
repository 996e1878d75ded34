"""Starts many short runs in one group of two processes; both files of tests about sharing look at what came out."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from support.forkserver import script_ranks

SCRIPTS = Path(__file__).resolve().parent / "scripts"


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
    done = script_ranks(2, SCRIPTS / "shared_runs.py", out, OMP_NUM_THREADS="1")
    return out, "\n".join(f"exit code {each.returncode}: {each.stderr}" for each in done if each.returncode)
