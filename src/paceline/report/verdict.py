"""The verdict on a run: its best value, and whether it reached what its recipe expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.report.history import History, is_number

Json = dict[str, Any]


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
        "best": best and {"value": best.metrics[metric], "step": best.step, "epoch": best.epoch, "split": best.split},
    }


def expectations(history: History, expect: Any, higher: Any, main: Json) -> list[Json]:
    """Each expected metric beside what was reached last, on test if there is one, else on val.

    `is_met` is None where nothing was measured, or where it is not known whether a higher value is better.
    """
    last = {split: each.metrics for split, each in history.last().items()}
    named = {
        f"{split.removeprefix('test.')}.{name}": value
        for split, metrics in last.items()
        if split.startswith("test.")
        for name, value in metrics.items()
    }
    reached = named | (last.get("test") or last.get("val") or {})
    known = {main["metric"]: main["is_higher_better"]} | (higher if isinstance(higher, dict) else {})
    found = []
    for metric, value in expect.items() if isinstance(expect, dict) else ():
        now, is_higher = reached.get(metric), known.get(metric)
        is_met = None
        if is_number(value) and is_number(now) and isinstance(is_higher, bool):
            is_met = now >= value if is_higher else now <= value
        expected = value if is_number(value) else None
        found.append({"metric": str(metric), "expected": expected, "reached": now, "is_met": is_met})
    return found
