"""`paceline.train`: what the command `train` does, from Python, with the history as its result."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.best import best_step, resolve_best
from paceline.commands.common import check_extras, check_writable
from paceline.commands.run_directory import refuse_foreign
from paceline.commands.run_lock import hold_lock
from paceline.commands.train import train_in_directory
from paceline.core.agreement import decide
from paceline.core.errors import UsageError
from paceline.core.extras import missing_extra
from paceline.core.generators import unchanged_generators
from paceline.engine.run import Run
from paceline.loggers.events import LoggerGroup, Record
from paceline.loggers.jsonl import read_records

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint that a run keeps as its best, by the metric that `checkpoint.best` names."""

    step: int
    metric: str
    value: float | None
    checkpoint: Path


@dataclass(frozen=True)
class TrainResult:
    """What a training run has come to."""

    out: Path
    """The run directory."""
    metrics: dict[str, dict[str, float]]
    """The last metrics of each split that was evaluated."""
    history: list[Record] = field(repr=False)
    """All records of `metrics.jsonl`: each has "step", "epoch", "split" and metrics by name."""
    best: BestCheckpoint | None

    def to_pandas(self) -> DataFrame:
        """The history as a table with a row for each record; needs pandas."""
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise UsageError(f"to_pandas: {missing_extra('pandas') or error}; `history` is a list of dicts") from error
        return pd.json_normalize(self.history)


@unchanged_generators()
def train(run: Run, fresh: bool = False) -> TrainResult:
    """Train a run that `build` made, in its directory, as the command does: it continues what is there already.

    A run that has made steps continues from them. With `fresh`, an earlier run is kept beside the new one.
    """
    if getattr(run, "builder", None) is None:
        raise UsageError("paceline.train takes a run that paceline.build made: paceline.train(paceline.build(RECIPE))")
    check_extras(run.builder.checked)
    check_writable(run.out)
    refuse_foreign(run.out)
    options = argparse.Namespace(fresh=fresh, start=None, accept_data=False, is_process=False)
    with hold_lock(run.out) if run.world.is_main else nullcontext() as lock:
        try:
            train_in_directory(run, run.builder, options, lock)
        finally:
            run.logger = LoggerGroup()  # those of the directory are closed
    history = decide(run.world, lambda: read_records(run.out / "metrics.jsonl"))
    return TrainResult(run.out, dict(run.state.metrics), history, _best(run, history))


def _best(run: Run, history: list[Record]) -> BestCheckpoint | None:
    metric = run.store.best
    step = decide(run.world, lambda: best_step(run.out))
    if metric is None or step is None:
        return None
    values: list[Any] = [each.get(metric) for each in history if each["step"] == step and each["split"] == "val"]
    place = resolve_best(run.out / "best") or run.store.path_of(step)
    return BestCheckpoint(step, metric, values[-1] if values else None, place)
