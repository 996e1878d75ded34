"""The watch over a process: what counts as a hang, and who is to blame."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from support.waiting import TIMEOUT, wait_until

from paceline.core.world import World
from paceline.engine.watchdog import Heartbeat, read_beat

_LIMIT = 0.5
_BEATING = """
import sys, time
from pathlib import Path
import torch
from paceline.core.world import World
from paceline.engine.watchdog import Heartbeat

folder, over = Path(sys.argv[1]), Path(sys.argv[1]) / "over"
heartbeat = Heartbeat(folder, World(0, 1, 0, torch.device("cpu")), float(sys.argv[2]), lambda message: print("hang"))
step = 0
with heartbeat.watched():
    while not over.exists():
        heartbeat.beat(step, "working")
        step += 1
        time.sleep(0.01)
"""


def step(folder: Path) -> int:
    beat = read_beat(folder, 0)
    return beat.step if beat else -1


def test_a_process_that_was_asleep_has_not_hung(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _BEATING, str(tmp_path), str(_LIMIT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: step(tmp_path) > 2, "it beats")
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(3 * _LIMIT)
        before = step(tmp_path)
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: step(tmp_path) > before + 100, "it goes on")
        (tmp_path / "over").touch()
        reports, _ = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, reports) == (0, "")


def test_without_a_beat_the_one_who_began_the_fewest_exchanges_is_missing(tmp_path: Path) -> None:
    reports: list[str] = []
    worlds = [Recorded(rank, 2, rank, torch.device("cpu")) for rank in (0, 1)]
    first, second = (Heartbeat(tmp_path, world, _LIMIT, reports.append) for world in worlds)
    with first.watched():
        first.beat(8, "comparing")
        with second.watched():
            second.beat(7, "waiting for rank 0")
            wait_until(lambda: len(reports) == 2, "both give up")
    assert all("rank 0 is missing, last seen comparing" in finding for finding in reports)


class Recorded(World):
    """Rank 1 has begun an exchange that rank 0 has not."""

    def num_collectives(self) -> int:
        return 32 + self.rank
