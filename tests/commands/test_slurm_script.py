"""The job script of deploy/, run by bash. Slurm's own commands are small scripts that do what the real ones would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shared_launch import environment
from support.waiting import TIMEOUT, wait_until

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm.sh"
# Passes signals on, as srun does, and ends as its command does.
_SRUN = """#!{python}
import pathlib, signal, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--")]
step = subprocess.Popen(words[:1] + sys.argv[sys.argv.index(words[0]) + 1:])
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: step.send_signal(number))
pathlib.Path("passing").touch()
code = step.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
_SCONTROL = """#!/bin/bash
echo "$@" >> scontrol.log
"""
# Stands for a run: it saves when asked to, or ends with a code, and says what it was given.
_PACELINE = """#!{python}
import os, pathlib, signal, sys, time
pathlib.Path("words.log").write_text("\\n".join(sys.argv[1:]))
signal.signal(signal.SIGUSR1, lambda number, frame: (time.sleep(0.2), os._exit(75)))
pathlib.Path("ready").touch()
if "code" in os.environ:
    sys.exit(int(os.environ["code"]))
time.sleep(1000)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL), ("paceline", _PACELINE)):
        program = tmp_path / "bin" / name
        program.write_text(text.replace("{python}", sys.executable))
        program.chmod(0o755)
    return tmp_path


def submit(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    variables = environment(PATH=path, SLURM_JOB_ID="42", **more)
    return subprocess.Popen(["bash", str(SCRIPT), *words], cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)


def catches(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    caught = next(line for line in lines if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_at_the_time_limit_the_job_goes_back_into_the_queue(cluster: Path) -> None:
    job = submit(cluster, "train", "recipe.yaml", "name=it's", "a=$HOME b")
    wait_until(lambda: all((cluster / name).exists() for name in ("passing", "ready")), "the run is there")
    wait_until(lambda: catches(job.pid, signal.SIGUSR1), "the script waits for the run")
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 0
    assert "requeued" in output
    assert (cluster / "scontrol.log").read_text() == "requeue 42\n"
    assert (cluster / "words.log").read_text().splitlines() == ["train", "recipe.yaml", "name=it's", "a=$HOME b"]


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (3, False), (75, True), (137, False)])
def test_only_a_run_that_can_go_on_is_queued_again(cluster: Path, code: int, requeued: bool) -> None:
    job = submit(cluster, "train", "quickstart", code=str(code))
    job.communicate(timeout=TIMEOUT)
    assert job.returncode == (0 if requeued else code)
    assert (cluster / "scontrol.log").exists() == requeued
