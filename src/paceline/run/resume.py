"""Resume a run: select the checkpoint, compare the data, count restarts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.reader import Checkpoint, open_checkpoint, step_folders
from paceline.core.agreement import decide, read_together
from paceline.core.atomic_write import replace_file
from paceline.core.errors import CheckpointError, DataError, RecipeError, TrainingError
from paceline.core.regular_file import read_json
from paceline.core.text import join_first
from paceline.data.fingerprint import DataFingerprint, differences, fingerprint
from paceline.engine.run import Run
from paceline.engine.state import check_state
from paceline.engine.watchdog import EVALUATING, Heartbeat, read_beat
from paceline.launch.environment import is_supervised, restart_count
from paceline.launch.failure import report_exit
from paceline.recipe.document import Document, Origin
from paceline.recipe.resolved import recipe_differences
from paceline.recipe.validate import validate

Fingerprints = Mapping[str, Mapping[str, Any]]
"""The fingerprint of each split, as saved in checkpoints."""
_MAX_FAILURES = 3
_MAX_IDS = 12
_MAX_MESSAGE = 500


def resume(
    run: Run, named: Path | None, is_first_start: bool, accepts_data: bool
) -> tuple[Checkpoint | None, list[str]]:
    """Load the named checkpoint, else the newest valid one; None if there is none.

    Also returns notes for the user.
    """
    checkpoint = read_together(run.world, lambda: _choose(run, named, is_first_start), open_checkpoint)
    run.store.last_step = decide(run.world, lambda: run.store.last_step)
    notes = [f"not used: {reason}" for reason in run.store.rejected]
    if checkpoint is None:
        return None, notes
    if changed := recipe_differences(checkpoint.state["recipe"], run.state.recipe):
        lines = "\n  ".join(changed)
        raise CheckpointError(
            f"{checkpoint.path} was made with another recipe:\n  {lines}\n"
            "change the recipe back, start over with --fresh, or choose another directory with --out"
        )
    notes += _check_data(checkpoint, run, accepts_data)
    run.restore(checkpoint)
    return checkpoint, [*notes, f"weights  from {checkpoint.path}, step {checkpoint.step}"]


def _choose(run: Run, named: Path | None, is_first_start: bool) -> Checkpoint | None:
    check = partial(_check, run)
    newest = run.store.newest(check)
    if named is None or (newest and not is_first_start):
        if newest is None and run.store.rejected:
            reasons = "\n  ".join(run.store.rejected)
            raise CheckpointError(
                f"{run.out}: no usable checkpoint:\n  {reasons}\n"
                "start over with --fresh, which keeps them, or from another checkpoint with --from"
            )
        return newest
    checkpoint = open_checkpoint(named)
    check(checkpoint)
    if newest and newest.step > checkpoint.step:
        raise CheckpointError(
            f"{run.out} holds step {newest.step}, newer than step {checkpoint.step} of {named};"
            " nothing newer is overwritten: choose another directory with --out"
        )
    return checkpoint


def _check(run: Run, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a state that no run saves, its recipe included."""
    check_state(checkpoint)
    saved = checkpoint.state["recipe"]
    if recipe_differences(saved, run.state.recipe):
        try:
            validate(Document(saved, values={(): Origin(f"{checkpoint.path}: state.json: recipe")}))
        except RecipeError as error:
            raise CheckpointError(error.problems[0][:_MAX_MESSAGE]) from error


def check_place(run: Run) -> list[str]:
    """Raise CheckpointError if the directory of a run that has made steps already holds another run's; else a note."""
    newest = decide(run.world, lambda: max((step for step, _ in step_folders(run.store.root)), default=None))
    if newest not in (None, run.progress.step):
        raise CheckpointError(
            f"{run.out} holds step {newest}, and this run is at step {run.progress.step}; build it with another out, or"
            " train with fresh=True, which keeps the earlier run beside it"
        )
    return [f"weights  from memory, step {run.progress.step}"]


def fingerprints(run: Run) -> dict[str, dict[str, Any]]:
    """The fingerprints of all splits as rank 0 sees them, on all ranks."""
    sources = {"train": run.train_loader} | {split: each.loader for split, each in run.evaluations.items()}
    return decide(run.world, lambda: {name: fingerprint(each.dataset).to_json() for name, each in sources.items()})


def data_differences(checkpoint: Checkpoint, now: Fingerprints) -> list[str]:
    """How the data of these splits differs from that of the checkpoint, one sentence each."""
    saved = checkpoint.state.get("data") or {}
    known = [split for split in now if split in saved]
    before, after = ({split: DataFingerprint.from_json(each[split]) for split in known} for each in (saved, now))
    return differences(before, after)


def _check_data(checkpoint: Checkpoint, run: Run, is_accepted: bool) -> list[str]:
    """Raise DataError if the data changed since the checkpoint; if accepted, return what no longer holds."""
    found = data_differences(checkpoint, run.state.data)
    if not found:
        return []
    if not is_accepted:
        raise DataError(
            f"{checkpoint.path} was saved with other data: {'; '.join(found)}."
            " Restore the data, start over with --fresh, or accept it with --accept-data"
        )
    return [
        f"data     changed since step {checkpoint.step}, accepted: {'; '.join(found)}",
        "         results differ from an uninterrupted run, the current epoch may not see every sample",
        f"         once, and metrics up to step {checkpoint.step} cannot be compared with later ones",
    ]


def watch_over(run: Run, limit: float) -> None:
    """Start the watchdog; raise TrainingError if the same step failed three times."""
    folder = run.out / "logs" / "heartbeats"
    if restart_count() and run.world.is_main:
        _count_failure(run, folder)
    run.world.barrier()  # nobody beats before the last beats were read
    if run.world.size > 1:
        run.heartbeat = Heartbeat(folder, run.world, limit, _give_up)


def _count_failure(run: Run, folder: Path) -> None:
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
    if times >= _MAX_FAILURES:
        counts.unlink()  # started by hand again, it is retried
        if any(beat.phase == EVALUATING for beat in beats if beat.step == step):
            raise TrainingError(f"the evaluation after step {step} failed {times} times; see the errors above")
        raise TrainingError(
            f"step {step + 1} failed {times} times; its samples are {_samples(run, step)}. Inspect them, and"
            " see the errors above"
        )


def _samples(run: Run, step: int) -> str:
    sampler = run.batches.sampler
    slices = sampler.slices(step)
    ids = run.batches.order.at(sampler.epoch(step), slices[0].start, slices[-1].stop)
    return join_first(ids, _MAX_IDS)


def _give_up(finding: str) -> None:
    if is_supervised():
        report_exit(1, finding, explained=False)
    else:
        print(finding, file=sys.stderr, flush=True)
    os._exit(1)
