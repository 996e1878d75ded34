"""Whether every precision learns as well as float32."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from time import perf_counter

import paceline
from benchmarks.report import Goal, Section

_PLAIN, _BEYOND = "fp32", "beyond noise"
_PRECISIONS = (_PLAIN, "bf16", "fp16", "O1", "O2", "O3")
_SEEDS, _EPOCHS = (0, 1, 2), 3
# Most processors emulate float16, which is slow: a small network for all, with smaller updates.
_CHANGES = {"model.widths": [8, 16], "data.batch": 32, "train.threads": 1, "observe.pictures": False}


def measure(is_quick: bool) -> Section:
    """The share of right answers after a short training in each precision, over seeds."""
    seeds = _SEEDS[:1] if is_quick else _SEEDS
    epochs = 1 if is_quick else _EPOCHS
    found: dict[str, list[float]] = {name: [] for name in _PRECISIONS}
    seconds = dict.fromkeys(_PRECISIONS, 0.0)
    for seed in seeds:
        for name in _PRECISIONS:
            begin = perf_counter()
            found[name].append(_top1({**_CHANGES, "train.epochs": epochs, "train.precision": name, "train.seed": seed}))
            seconds[name] += (perf_counter() - begin) / len(seeds)
    rows = [_row(name, values, found[_PLAIN], seconds[name]) for name, values in found.items()]
    far = [name for name, values in found.items() if _verdict(values, found[_PLAIN]) == _BEYOND]
    return Section(
        "Precisions",
        f"The quickstart with a network of {_CHANGES['model.widths']} channels, {_CHANGES['data.batch']} samples an"
        f" update and epochs: {epochs}, with {len(seeds)} seeds: top-1 on the test"
        " split at the end, evaluated in the same precision. Within noise: the means differ from float32's by at most"
        " two standard errors of their difference, or by no more than float32's own results differ among seeds."
        " Seconds are those of this processor, which emulates float16.",
        ["precision", "top1, mean", "least–most", "against fp32", "two standard errors", "verdict", "seconds a run"],
        rows,
        [Goal("every precision within noise of fp32", f"beyond it: {', '.join(far) or 'none'}", not far)]
        if len(seeds) > 1
        else [],
    )


def _verdict(values: Sequence[float], plain: Sequence[float]) -> str:
    if len(values) < 2:
        return "needs more seeds"
    difference = abs(statistics.mean(values) - statistics.mean(plain))
    is_noise = difference <= max(2 * _standard_error(values, plain), max(plain) - min(plain))
    return "within noise" if is_noise else _BEYOND


def _standard_error(values: Sequence[float], plain: Sequence[float]) -> float:
    """Of the difference of two means."""
    if len(values) < 2:
        return float("nan")
    return sqrt(sum(statistics.variance(each) / len(each) for each in (values, plain)))


def _top1(overrides: dict[str, object]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = paceline.build("quickstart", overrides, out=Path(folder) / "run")
        paceline.train(run)
        return run.figures["val"]["top1"]


def _row(name: str, values: Sequence[float], plain: Sequence[float], seconds: float) -> list[str]:
    difference = statistics.mean(values) - statistics.mean(plain)
    return [
        name,
        f"{statistics.mean(values):.4f}",
        f"{min(values):.4f}–{max(values):.4f}",
        f"{difference:+.4f}",
        "" if name == _PLAIN else f"{2 * _standard_error(values, plain):.4f}",
        "" if name == _PLAIN else _verdict(values, plain),
        f"{seconds:.0f}",
    ]
