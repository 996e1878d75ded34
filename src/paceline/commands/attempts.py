"""A run of several processes under watch: who hangs is named, and a step that fails again and again ends the run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.counting import listed
from paceline.core.errors import TrainingError
from paceline.launch.environment import is_supervised, restart_count
from paceline.launch.worker import tell

if TYPE_CHECKING:
    from paceline.engine.run import Run

_MOST_FAILURES = 3
_SHOWN = 12


def watch_over(run: Run, limit: float) -> None:
    """Have the processes of a run give signs of life; raises TrainingError if the same step failed three times."""
    from paceline.engine.heartbeat import Heartbeat

    folder = run.out / "logs" / "heartbeats"
    if restart_count() and run.mesh.is_main:
        _count_failure(run, folder)
    run.mesh.barrier()  # nobody beats before the last beats were read
    if run.mesh.world > 1:
        run.heartbeat = Heartbeat(folder, run.mesh, limit, _give_up)


def _count_failure(run: Run, folder: Path) -> None:
    from paceline.engine.heartbeat import read_beat

    beats = [beat for rank in range(run.mesh.world) if (beat := read_beat(folder, rank))]
    if not beats:
        return
    step = max(beat.step for beat in beats)
    counts = folder / "failures.json"
    try:
        before = json.loads(counts.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    times = before.get("times", 0) + 1 if before.get("step") == step else 1
    folder.mkdir(parents=True, exist_ok=True)
    counts.write_text(json.dumps({"step": step, "times": times}), encoding="utf-8")
    if times >= _MOST_FAILURES:
        counts.unlink()  # started by hand again, it is tried anew
        raise TrainingError(
            f"update {step + 1} failed {times} times; its samples are {_samples(run, step)}. Look at them with the"
            " data set, and at the reasons given above"
        )


def _samples(run: Run, step: int) -> str:
    updates = run.batches.updates
    cuts = updates.cuts(step)
    ids = run.batches.order.at(updates.epoch(step), cuts[0].start, cuts[-1].stop)
    return listed(ids, _SHOWN)


def _give_up(finding: str) -> None:
    if is_supervised():
        tell(1, finding, explained=False)
    else:
        print(finding, file=sys.stderr, flush=True)
    os._exit(1)
