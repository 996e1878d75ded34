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
from paceline.core.errors import TrainingError

_PLAIN = "fp32"
_WITHIN = "within noise"
_CASES: dict[str, dict[str, object]] = {
    name: {"train.precision": name} for name in (_PLAIN, "bf16", "fp16", "O1", "O2", "O3")
}
_SEEDS, _EPOCHS = (0, 1, 2), 3
# Most processors emulate float16, which is slow: a small network for all, with smaller steps.
_CHANGES = {"model.widths": [8, 16], "data.batch_size": 32, "train.threads": 1, "logging.images": False}


def measure(is_quick: bool) -> Section:
    """The share of right answers after a short training in each precision, over seeds."""
    seeds = _SEEDS[:1] if is_quick else _SEEDS
    epochs = 1 if is_quick else _EPOCHS
    found: dict[str, list[float]] = {name: [] for name in _CASES}
    seconds = dict.fromkeys(_CASES, 0.0)
    for seed in seeds:
        for name, changes in _CASES.items():
            begin = perf_counter()
            found[name].append(_top1({**_CHANGES, **changes, "train.epochs": epochs, "train.seed": seed}))
            seconds[name] += (perf_counter() - begin) / len(seeds)
    rows = [_row(name, values, found[_PLAIN], seconds[name]) for name, values in found.items()]
    verdicts = {name: _verdict(values, found[_PLAIN]) for name, values in found.items()}
    far = [name for name, verdict in verdicts.items() if verdict != _WITHIN]
    return Section(
        "Precisions",
        f"quickstart with a model of {_CHANGES['model.widths']} channels, batch size {_CHANGES['data.batch_size']};"
        f" epochs: {epochs}, seeds: {len(seeds)}. Top-1 on the test split at the end, evaluated in the same precision."
        " *Within noise*: the means differ from fp32 by at most two standard errors of the difference, or by no more"
        " than fp32 differs between seeds. A run that ends early because of an overflow counts as 0. This processor"
        " emulates float16.",
        ["precision", "top1, mean", "least–most", "against fp32", "two standard errors", "verdict", "seconds a run"],
        rows,
        [Goal("every precision within noise of fp32", f"beyond it: {', '.join(far) or 'none'}", not far)]
        if len(seeds) > 1
        else [],
    )


def _verdict(values: Sequence[float], plain: Sequence[float]) -> str:
    if len(values) < 2:
        return "needs more seeds"
    if 0.0 in values:  # such a value widens the noise so much that it would hide itself
        return f"{values.count(0.0)} of {len(values)} ended early"
    difference = abs(statistics.mean(values) - statistics.mean(plain))
    is_noise = difference <= max(2 * _standard_error(values, plain), max(plain) - min(plain))
    return _WITHIN if is_noise else "beyond noise"


def _standard_error(values: Sequence[float], plain: Sequence[float]) -> float:
    """Of the difference of two means."""
    if len(values) < 2:
        return float("nan")
    return sqrt(sum(statistics.variance(each) / len(each) for each in (values, plain)))


def _top1(overrides: dict[str, object]) -> float:
    """The share of right answers; none where numbers left the range of their format and training ended."""
    with tempfile.TemporaryDirectory() as folder:
        run = paceline.build("quickstart", overrides, out=Path(folder) / "run")
        try:
            paceline.train(run)
        except TrainingError:
            return 0.0
        return run.state.metrics["val"]["top1"]


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
