"""The job script, run by bash. Slurm's own commands are small scripts that do what the real ones would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shared_launch import environment
from support.waiting import TIMEOUT, wait_until

from paceline.cli import main
from paceline.commands.slurm import Job, array_script, job_script

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


def submit(folder: Path, script: str, **more: str) -> subprocess.Popen[str]:
    (folder / "job.sh").write_text(script)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    variables = environment(PATH=path, SLURM_JOB_ID="42", **more)
    return subprocess.Popen(["bash", "job.sh"], cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)


def catches(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    caught = next(line for line in lines if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_at_the_time_limit_the_job_goes_back_into_the_queue(cluster: Path) -> None:
    job = submit(cluster, job_script(Job("a"), ["train", "recipe.yaml", "name=it's", "a=$HOME b"]))
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
    job = submit(cluster, job_script(Job("a"), ["train", "quickstart"]), code=str(code))
    job.communicate(timeout=TIMEOUT)
    assert job.returncode == (0 if requeued else code)
    assert (cluster / "scontrol.log").exists() == requeued


def test_a_task_of_an_array_runs_its_own_command(cluster: Path) -> None:
    tasks = {0: ["train", "a"], 3: ["train", "it's", "x=$HOME [1, 2]"]}
    script = array_script(Job("a"), tasks, 2)
    assert "#SBATCH --array=0,3%2\n" in script
    assert "#SBATCH --array=0,3\n" in array_script(Job("a"), tasks)
    job = submit(cluster, script, code="75", SLURM_ARRAY_TASK_ID="3")
    job.communicate(timeout=TIMEOUT)
    assert job.returncode == 0
    assert (cluster / "words.log").read_text().splitlines() == tasks[3]
    assert (cluster / "scontrol.log").read_text() == "requeue 42\n"  # of an array, this is the id of the task


def test_what_slurm_is_asked_for() -> None:
    script = job_script(Job("cats", 2, 4, "01:00:00", needs_gpus=True), ["train", "x"])
    asked = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert asked == {
        "job-name=cats", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "time=01:00:00",
        "signal=B:USR1@120", "open-mode=append", "output=%x-%j.log", "requeue",
    }  # fmt: skip
    plain = job_script(Job("cats"), ["train", "x"])
    assert not any(name in plain for name in ("--time=", "--gpus"))


def test_the_command_checks_the_recipe_and_writes_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", "quickstart", "train.epochs=3", "--procs", "2", "--nodes", "2"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n")
    assert "paceline train quickstart train.epochs=3 &\n" in script
    assert "#SBATCH --ntasks-per-node=2\n" in script
    out = tmp_path / "job.sh"
    assert main(["slurm", "quickstart", "--out", str(out), "--time", "2-00:00:00"]) == 0
    assert "paceline train quickstart --procs 1 &\n" in out.read_text()
    assert subprocess.run(["bash", "-n", str(out)]).returncode == 0
    assert main(["slurm", "quickstart", "optimizer.lr=fast"]) == 2
    assert main(["slurm", "quickstart", "--time", "soon"]) == 2
    assert main(["slurm", "quickstart", "--nodes", "0"]) == 2
    assert main(["slurm", "quickstart", "--out", str(tmp_path / "no" / "job.sh")]) == 2
