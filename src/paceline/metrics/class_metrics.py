"""Metrics of single classes, `ap.cat`: of many, the mean and those of a few classes stand for all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

_MAX_SINGLE = 10  # classes whose metrics are still printed one by one
_NUM_AT_ENDS = 3
HEADER = ("mean", "highest", "lowest")
"""What `summarize` gives."""


def split_classes(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The names of metrics to print one by one, and the metrics that have too many classes for that."""
    classes: dict[str, int] = {}
    distinct = list(dict.fromkeys(names))
    for name in distinct:
        metric, dot, _ = name.partition(".")
        classes[metric] = classes.get(metric, 0) + bool(dot)
    many = [metric for metric, number in classes.items() if number > _MAX_SINGLE]
    return [name for name in distinct if "." not in name or name.partition(".")[0] not in many], many


def summarize(metrics: Mapping[str, float | None], metric: str) -> tuple[str, str, str]:
    """The mean of a metric over classes with their number, and the classes with the highest and the lowest values."""
    own = {name.partition(".")[2]: value for name, value in metrics.items() if name.startswith(f"{metric}.")}
    known = {name: value for name, value in own.items() if value is not None and math.isfinite(value)}
    if not known:
        return ("nan", "", "") if own else ("", "", "")
    ordered = sorted(known, key=lambda name: -known[name])
    named = (ordered[:_NUM_AT_ENDS], ordered[::-1][:_NUM_AT_ENDS])
    highest, lowest = (", ".join(f"{name} {known[name]:.3g}" for name in names) for names in named)
    return f"{statistics.fmean(known.values()):.4f} of {len(known)}", highest, lowest
