"""The history of a run from its records: a series for each metric, and its evaluations."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from paceline.core.text import doubled_loss, evenly_spaced
from paceline.loggers.events import Record
from paceline.loggers.jsonl import metrics_of
from paceline.report.series import Series

_CLOCK = ("samples_per_second", "data_wait", "memory_mb")
_MAX_EVALUATIONS = 200  # of a split, in the table
_LARGEST = sys.float_info.max
_MAX_SERIES = 400  # a run of a thousand classes has more metrics than anybody looks at


@dataclass
class Evaluation:
    """The metrics of a split at a step."""

    split: str
    step: int
    epoch: float
    num_samples: int
    num_skipped: int
    seconds: float | None
    metrics: dict[str, float | None]


@dataclass
class History:
    """What a run has logged so far; bounded in size."""

    series: dict[tuple[str, str], Series] = field(default_factory=dict)
    """By split and metric; the speed of training and its memory count as metrics of "train"."""
    times: Series = field(default_factory=Series)
    evaluations: dict[str, list[Evaluation]] = field(default_factory=dict)
    steps_per_epoch: float | None = None

    def add(self, record: Record) -> None:
        """Add the next record of `metrics.jsonl`."""
        step, split, clock = record["step"], record["split"], record.get("clock") or {}
        metrics = metrics_of(record)
        if split != "train":
            self._add_evaluation(record, metrics)
        elif isinstance(clock, dict):
            metrics |= {name: clock[name] for name in _CLOCK if is_number(clock.get(name))}
        doubled = doubled_loss({name: math.nan if value is None else value for name, value in metrics.items()})
        for name, value in metrics.items():
            if name != doubled and "." not in name:  # those of single classes are in the tables
                self._series(split, name).add(step, value)
        if is_number(clock.get("time")):
            self.times.add(step, clock["time"])
        if step and is_number(record.get("epoch")) and record["epoch"] > 0:
            self.steps_per_epoch = step / record["epoch"]

    def last(self) -> dict[str, Evaluation]:
        """The last evaluation of each split."""
        return {split: evaluations[-1] for split, evaluations in self.evaluations.items()}

    def best(self, metric: str, is_higher: bool, split: str = "val") -> Evaluation | None:
        """The evaluation with the best finite value of a metric, the first of equal ones."""
        found = [each for each in self.evaluations.get(split, []) if is_number(each.metrics.get(metric))]
        sign = 1 if is_higher else -1
        return max(found, key=lambda each: sign * (each.metrics[metric] or 0.0), default=None)

    def _series(self, split: str, name: str) -> Series:
        if (split, name) not in self.series and len(self.series) >= _MAX_SERIES:
            return Series()
        return self.series.setdefault((split, name), Series())

    def _add_evaluation(self, record: Record, metrics: dict[str, float | None]) -> None:
        names = ("epoch", "num_samples", "num_skipped")
        epoch, num_samples, num_skipped = (value if is_number(value := record.get(name)) else 0 for name in names)
        seconds = (record.get("clock") or {}).get("seconds")
        self.evaluations.setdefault(record["split"], []).append(
            Evaluation(
                split=record["split"],
                step=record["step"],
                epoch=epoch,
                num_samples=int(num_samples),
                num_skipped=int(num_skipped),
                seconds=seconds if is_number(seconds) else None,
                metrics=metrics,
            )
        )


def thinned(evaluations: list[Evaluation], kept_steps: set[int]) -> list[Evaluation]:
    """At most a table of evaluations: evenly spaced ones, the last, and those at `kept_steps`."""
    size = len(evaluations)
    kept = {size - 1, *evenly_spaced(size, _MAX_EVALUATIONS)}
    return [each for place, each in enumerate(evaluations) if place in kept or each.step in kept_steps]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number, as other programs read it."""
    is_any = isinstance(value, int | float) and not isinstance(value, bool)
    return is_any and -_LARGEST <= value <= _LARGEST
