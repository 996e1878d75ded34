"""Jobs side by side: their shares of the machine, how they are stopped, and that none outlives the pool's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment
from support.waiting import TIMEOUT, is_alive, wait_until

from paceline.launch.job_pool import JobPool, share_of

_SHOW = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print(os.environ["OMP_NUM_THREADS"], sorted(os.sched_getaffinity(0)), os.environ["CUDA_VISIBLE_DEVICES"])
"""


def ended_of(pool: JobPool) -> dict[str, int]:
    """The exit codes of all jobs, when they have ended."""
    ended: dict[str, int] = {}

    def has_ended() -> bool:
        ended.update(pool.poll())
        return not pool.num_running

    wait_until(has_ended, "all jobs have ended")
    return ended


@pytest.mark.parametrize(
    ("number", "size", "shares"),
    [(8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]), (5, 2, [[0, 1], [2, 3, 4]]), (2, 3, [[0], [1], [0]]), (1, 1, [[0]])],
)
def test_shares_are_disjoint_unless_there_are_too_few(number: int, size: int, shares: list[list[int]]) -> None:
    assert [list(share_of(range(number), place, size)) for place in range(size)] == shares


def test_each_job_has_its_share_of_cores_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-c", _SHOW, str(tmp_path / "go")]
    with JobPool(2, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]) as pool:
        for name in ("a", "b"):
            assert pool.has_room
            pool.start(name, command, tmp_path / name)
        assert not pool.has_room
        (tmp_path / "go").touch()
        assert ended_of(pool) == {"a": 0, "b": 0}
    threads = max(1, len(cores) // 2)
    for place, (name, devices) in enumerate([("a", "GPU-a,GPU-b"), ("b", "GPU-c,GPU-d")]):
        expected = f"{threads} {list(share_of(cores, place, 2))} {devices}\n"
        assert (tmp_path / name).read_text() == expected


def test_the_processes_of_a_job_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("paceline.launch.environment.num_cores", lambda: 16)
    assert JobPool(2, processes=4).variables(0)["OMP_NUM_THREADS"] == "2"
    assert JobPool(2, processes=16).variables(0)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # what the user has set stays
    assert "OMP_NUM_THREADS" not in JobPool(2).variables(0)


def test_jobs_are_asked_to_stop_and_killed_if_they_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import signal, sys, time; signal.signal(15, {handler}); print('go', flush=True); time.sleep(99)"
    for name, handler, expected in (
        ("polite", "lambda *_: sys.exit(75)", 75),
        ("stubborn", "signal.SIG_IGN", -signal.SIGKILL),
    ):
        with JobPool(1) as pool:
            pool.start(name, [sys.executable, "-c", code.format(handler=handler)], tmp_path / name)
            wait_until(lambda: (tmp_path / name).read_text() == "go\n", "it runs")  # noqa: B023
            pool.stop()
            assert ended_of(pool) == {name: expected}
        monkeypatch.setattr("paceline.launch.job_pool._STOP_SECONDS", 0.0)


def test_jobs_end_with_the_process_of_the_pool(tmp_path: Path) -> None:
    job = (
        "import os, time; from pathlib import Path; from paceline.launch.environment import end_with_sweep;"
        "end_with_sweep(); assert 'PACELINE_PARENT' not in os.environ;"
        "Path('pid.part').write_text(str(os.getpid())); os.rename('pid.part', 'pid'); time.sleep(999)"
    )
    pool = (
        "import sys, time; from pathlib import Path; from paceline.launch.job_pool import JobPool\n"
        f"with JobPool(1) as pool: pool.start('a', [sys.executable, '-c', {job!r}], Path('log')); time.sleep(999)"
    )
    process = subprocess.Popen([sys.executable, "-c", pool], cwd=tmp_path, env=environment())
    wait_until(lambda: (tmp_path / "pid").exists() or process.poll() is not None, "the job runs")
    child = int((tmp_path / "pid").read_text())
    assert is_alive(child)
    process.kill()
    process.wait(TIMEOUT)
    wait_until(lambda: not is_alive(child), "the job has ended")
