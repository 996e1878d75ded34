"""The history of a run from its records: a series for each metric, its evaluations, and the verdict on them.

Series are bounded in size however long a run is; extremes are kept.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeGuard

from paceline.core.text import doubled_loss, evenly_spaced
from paceline.loggers.events import Record
from paceline.loggers.jsonl import metrics_of

Json = dict[str, Any]
Point = tuple[int, float | None]
"""A step and the value there; None where it was not finite."""

NUM_BUCKETS = 500
"""Intervals of steps that a series is reduced to; each keeps its least and its greatest value."""
_MAX_POINTS = 8 * NUM_BUCKETS
_CLOCK = ("samples_per_second", "data_wait", "memory_mb")
_MAX_EVALUATIONS = 200  # of a split, in the table
_LARGEST = sys.float_info.max
_MAX_SERIES = 400  # a run of a thousand classes has more metrics than anybody looks at


class Series:
    """The values of a metric by step, in the order in which they were logged.

    Points beyond a limit are reduced at once, so that the memory of a series does not grow with the run.
    """

    def __init__(self) -> None:
        self._points: list[Point] = []

    def add(self, step: int, value: float | None) -> None:
        """Add the next point."""
        self._points.append((step, value if value is not None and math.isfinite(value) else None))
        if len(self._points) > _MAX_POINTS:
            self._points = downsample(self._points, 2 * NUM_BUCKETS)

    def points(self) -> list[Point]:
        """At most four points for each of `NUM_BUCKETS` intervals, usually two."""
        return downsample(self._points, NUM_BUCKETS)


def downsample(points: list[Point], num_buckets: int) -> list[Point]:
    """The first and last point, and of each interval of steps the least, the greatest and the first missing value.

    Fewer than two points per interval are returned as they are.
    """
    if len(points) <= 2 * num_buckets:
        return points
    first, last = points[0][0], points[-1][0]
    width = max(1, math.ceil((last - first + 1) / num_buckets))
    kept = {points[0], points[-1]}
    for _, bucket in groupby(points, key=lambda point: (point[0] - first) // width):
        # Missing values come last, those that are known from the least to the greatest.
        ranked = sorted(bucket, key=lambda point: (point[1] is None, point[1] or 0.0))
        num_known = sum(value is not None for _, value in ranked)
        kept.update(ranked[:1], ranked[max(0, num_known - 1) : num_known + 1])
    return sorted(kept, key=lambda point: point[0])


@dataclass
class History:
    """What a run has logged so far; bounded in size."""

    series: dict[tuple[str, str], Series] = field(default_factory=dict)
    """By split and metric; the speed of training and its memory count as metrics of "train"."""
    times: Series = field(default_factory=Series)
    evaluations: dict[str, list[Json]] = field(default_factory=dict)
    """By split: step, epoch, number of samples and so on, and "metrics"."""
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

    def last(self) -> dict[str, Json]:
        """The last evaluation of each split."""
        return {split: evaluations[-1] for split, evaluations in self.evaluations.items()}

    def best(self, metric: str, is_higher: bool, split: str) -> Json | None:
        """The evaluation with the best finite value of a metric, the first of equal ones."""
        found = [each for each in self.evaluations.get(split, []) if is_number(each["metrics"].get(metric))]
        sign = 1 if is_higher else -1
        return max(found, key=lambda each: sign * each["metrics"][metric], default=None)

    def _series(self, split: str, name: str) -> Series:
        if (split, name) not in self.series and len(self.series) >= _MAX_SERIES:
            return Series()
        return self.series.setdefault((split, name), Series())

    def _add_evaluation(self, record: Record, metrics: dict[str, float | None]) -> None:
        numbers = {name: record.get(name) for name in ("epoch", "num_samples", "num_skipped")}
        seconds = (record.get("clock") or {}).get("seconds")
        evaluation = {
            "split": record["split"],
            "step": record["step"],
            **{name: value if is_number(value) else 0 for name, value in numbers.items()},
            "seconds": seconds if is_number(seconds) else None,
            "metrics": metrics,
        }
        self.evaluations.setdefault(record["split"], []).append(evaluation)


def thinned(evaluations: list[Json], kept_steps: set[int]) -> list[Json]:
    """At most a table of evaluations: evenly spaced ones, the last, and those at `kept_steps`."""
    size = len(evaluations)
    kept = {size - 1, *evenly_spaced(size, _MAX_EVALUATIONS)}
    return [each for place, each in enumerate(evaluations) if place in kept or each["step"] in kept_steps]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number, as other programs read it."""
    is_any = isinstance(value, int | float) and not isinstance(value, bool)
    return is_any and -_LARGEST <= value <= _LARGEST


def judge(history: History, main: tuple[str, bool] | None, tree: Mapping[str, Any]) -> Json:
    """The metric that a run is judged by, and the evaluation on val where it was best.

    Without one in the status it is the first that the recipe expects, or else the loss.
    """
    expected = next(iter(tree.get("expect") or {}), None)
    metric, is_higher = main or (expected or "loss", expected is not None)
    split = "val" if "val" in history.evaluations else next(iter(history.evaluations), "val")
    best = history.best(metric, is_higher, split)
    return {
        "main": {"metric": metric, "is_higher_better": is_higher, "split": split},
        "best": best
        and {"value": best["metrics"][metric], **{name: best[name] for name in ("step", "epoch", "split")}},
    }


def expectations(
    expect: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Any]], higher: Mapping[str, Any]
) -> list[Json]:
    """Each expected metric beside what was reached last, by split in `metrics`: on test if there is one, else on val.

    `higher` says of metrics whether a higher value is better. `is_met` is None where that is not known, or nothing was
    measured.
    """
    found = []
    reached = reached_metrics(metrics)
    for metric, value in expect.items():
        now, is_higher, is_met = reached.get(metric), higher.get(metric), None
        if is_number(value) and is_number(now) and isinstance(is_higher, bool):
            is_met = now >= value if is_higher else now <= value
        expected = value if is_number(value) else None
        found.append({"metric": str(metric), "expected": expected, "reached": now, "is_met": is_met})
    return found


def reached_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> Json:
    """What expectations are compared with: metrics on test or val, and those of test sets by NAME.METRIC."""
    named = {
        f"{split.removeprefix('test.')}.{name}": value
        for split, own in metrics.items()
        if split.startswith("test.")
        for name, value in own.items()
    }
    return named | dict(metrics.get("test") or metrics.get("val") or {})
