"""What activation checkpointing, bf16 and a second process save in memory, and what checkpointing costs in time."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.measuring import Turn, interleave, spread
from benchmarks.memory_case import Trainee
from benchmarks.report import Goal, Section, at_most
from paceline.core.world import join

_PLAIN, _AGAIN, _BF16, _BOTH = "plain", "checkpointing", "bf16", "bf16 + checkpointing"
_OPTIONS: dict[str, list[str]] = {
    _PLAIN: [],
    _AGAIN: ["--checkpointing", "blocks"],
    _BF16: ["--bf16"],
    _BOTH: ["--bf16", "--checkpointing", "blocks"],
}
_LIGHT, _RESNET = "light", "resnet50"
_NAMES = {_LIGHT: "light", _RESNET: "ResNet-50"}
_MEBI = 2**20


class Case(NamedTuple):
    """A row of the table."""

    model: str
    processes: int
    way: str

    def plain(self) -> Case:
        """What it is compared with."""
        return Case(self.model, 1, _PLAIN)


_PUBLISHED = {
    Case(_LIGHT, 1, _PLAIN): 9009,
    Case(_LIGHT, 1, _AGAIN): 4501,
    Case(_LIGHT, 1, _BF16): 5527,
    Case(_LIGHT, 1, _BOTH): 3385,
    Case(_LIGHT, 2, _PLAIN): 5733,
    Case(_LIGHT, 2, _AGAIN): 3335,
    Case(_LIGHT, 2, _BF16): 3409,
    Case(_LIGHT, 2, _BOTH): 2215,
}
"""MiB that the authors of MINet's memory table saw in use on their cards, the larger of two; their AMP is fp16."""
_Peaks = dict[Case, dict[str, int]]


def measure(is_quick: bool) -> Section:
    """Bytes of tensors at their peak, growth of the process, and seconds a step, for each case."""
    shapes = [(_LIGHT, 1)] if is_quick else [(_LIGHT, 1), (_LIGHT, 2), (_RESNET, 1)]
    cases = [Case(model, processes, way) for model, processes in shapes for way in _OPTIONS]
    metrics = {case: _in_fresh_processes(case) for case in cases}
    rounds = 2 if is_quick else 5
    seconds = interleave({_PLAIN: _step("none"), _AGAIN: _step("blocks")}, rounds)
    slower = seconds[_AGAIN].ratios(seconds[_PLAIN])
    method = (
        "MINet on four images of 320², SGD with momentum, BCE + CEL, in new processes, after two steps. *Activations*"
        " are the peak of live tensor bytes without parameters, gradients, buffers and optimizer state; *total* is the"
        " peak with them. Both are counted, not estimated. Two processes (ddp) have two images each; the larger one is"
        " shown. *Published* ratios are MiB in use on GPUs for the light variant with multi-scale training; compare"
        f" them with the totals. {_state(metrics)} *Resident growth* is the maximum growth of the process since before"
        " the first step (allocator, threads and libraries included). This processor emulates bf16, so its time is not"
        f" shown. Checkpointing takes {statistics.median(slower):.2f} × the time of a plain step of the light variant"
        f" (middle half {spread(slower)}, {rounds} steps each in turns, {seconds[_PLAIN].median:.2f} s plain)."
    )
    header = [
        *("MINet", "processes", "activations, MiB", "ratio", "total, MiB", "ratio", "published ratio"),
        *("resident growth, MiB", "ratio"),
    ]
    rows = [_row(case, metrics) for case in cases]
    return Section("Memory of a training step", method, header, rows, _goals(metrics, statistics.median(slower)))


def _state(metrics: _Peaks) -> str:
    """The share of the total that activation checkpointing cannot free."""
    plain = {case: each for case, each in metrics.items() if case == case.plain()}
    shares = [
        f"{each['state'] / _MEBI:.0f} MiB of {_NAMES[case.model]} ({each['state'] / each['total']:.3f} of plain)"
        for case, each in plain.items()
    ]
    return f"Parameters, gradients and optimizer state, which checkpointing cannot reduce, are {' and '.join(shares)}."


def _row(case: Case, metrics: _Peaks) -> list[str]:
    def pair(metric: str) -> list[str]:
        return [f"{metrics[case][metric] / _MEBI:.0f}", f"{_ratio(case, metric, metrics):.3f}"]

    published = f"{_PUBLISHED[case] / _PUBLISHED[case.plain()]:.3f}" if case in _PUBLISHED else "–"
    name = f"{_NAMES[case.model]}: {case.way}"
    return [name, str(case.processes), *pair("activations"), *pair("total"), published, *pair("resident")]


def _ratio(case: Case, metric: str, metrics: _Peaks) -> float:
    return metrics[case][metric] / metrics[case.plain()][metric]


def _goals(metrics: _Peaks, slower: float) -> list[Goal]:
    again, both = Case(_LIGHT, 1, _AGAIN), Case(_LIGHT, 1, _BOTH)
    aims = (
        ("activations with checkpointing, of plain", _ratio(again, "activations", metrics), 0.40),
        ("activations with bf16 and checkpointing, of plain", _ratio(both, "activations", metrics), 0.25),
        ("total with bf16 and checkpointing, of plain", _ratio(both, "total", metrics), 0.376),
        ("time of a step with checkpointing, of plain", slower, 1.40),
    )
    return [at_most(text, value, limit, "{:.3f}") for text, value, limit in aims]


def _step(checkpointing: str) -> Turn:
    trainee = Trainee(join("cpu"), _LIGHT, checkpointing, is_bf16=False)

    def take() -> float:
        begin = perf_counter()
        trainee.step()
        return perf_counter() - begin

    return take


def _in_fresh_processes(case: Case) -> dict[str, int]:
    options = ["--model", case.model, "--processes", str(case.processes), *_OPTIONS[case.way]]
    command = [sys.executable, "-m", "benchmarks.memory_case", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    metrics: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return metrics
