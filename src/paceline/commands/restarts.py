"""A run of several processes under watch: who hangs is named, and a step that fails again and again ends the run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.atomic_write import replace_file
from paceline.core.errors import TrainingError
from paceline.core.json_file import read_json
from paceline.core.text import join_first
from paceline.launch.environment import is_supervised, restart_count
from paceline.launch.worker import tell

if TYPE_CHECKING:
    from paceline.engine.run import Run

_MOST_FAILURES = 3
_SHOWN = 12


def watch_over(run: Run, limit: float) -> None:
    """Have the processes of a run give signs of life; raises TrainingError if the same step failed three times."""
    from paceline.engine.watchdog import Heartbeat

    folder = run.out / "logs" / "heartbeats"
    if restart_count() and run.world.is_main:
        _count_failure(run, folder)
    run.world.barrier()  # nobody beats before the last beats were read
    if run.world.size > 1:
        run.heartbeat = Heartbeat(folder, run.world, limit, _give_up)


def _count_failure(run: Run, folder: Path) -> None:
    from paceline.engine.watchdog import EVALUATING, read_beat

    beats = [beat for rank in range(run.world.size) if (beat := read_beat(folder, rank))]
    if not beats:
        return
    step = max(beat.step for beat in beats)
    counts = folder / "failures.json"
    before = read_json(counts)
    is_again = isinstance(before, dict) and before.get("step") == step and type(before.get("times")) is int
    times = before["times"] + 1 if is_again else 1
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(counts, json.dumps({"step": step, "times": times}).encode(), is_durable=False)
    if times >= _MOST_FAILURES:
        counts.unlink()  # started by hand again, it is tried anew
        if any(beat.phase == EVALUATING for beat in beats if beat.step == step):
            raise TrainingError(f"the evaluation after step {step} failed {times} times, for the reasons given above")
        raise TrainingError(
            f"step {step + 1} failed {times} times; its samples are {_samples(run, step)}. Look at them with the"
            " data set, and at the reasons given above"
        )


def _samples(run: Run, step: int) -> str:
    updates = run.batches.updates
    slices = updates.slices(step)
    ids = run.batches.order.at(updates.epoch(step), slices[0].start, slices[-1].stop)
    return join_first(ids, _SHOWN)


def _give_up(finding: str) -> None:
    if is_supervised():
        tell(1, finding, explained=False)
    else:
        print(finding, file=sys.stderr, flush=True)
    os._exit(1)
