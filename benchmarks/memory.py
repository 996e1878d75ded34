"""What activation checkpointing and bf16 save in memory, and what they cost in time."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

from benchmarks.measuring import Turn, interleave, spread
from benchmarks.memory_case import Trainee
from benchmarks.report import Goal, Section

_PLAIN, _AGAIN, _BOTH = "plain", "checkpointing", "bf16 + checkpointing"
_CASES: dict[str, list[str]] = {
    _PLAIN: [],
    _AGAIN: ["--checkpointing", "blocks"],
    "selective checkpointing": ["--checkpointing", "selective"],
    "bf16": ["--bf16"],
    _BOTH: ["--bf16", "--checkpointing", "blocks"],
}
_MEBI = 2**20


def measure(is_quick: bool) -> Section:
    """Bytes of tensors at their peak, growth of the process, and seconds a step, for each case."""
    counted = {name: _in_fresh_process([*options, "--count"]) for name, options in _CASES.items()}
    resident = {name: _in_fresh_process(options) for name, options in _CASES.items()}
    rounds = 3 if is_quick else 7
    seconds = interleave({_PLAIN: _step("none"), _AGAIN: _step("blocks")}, rounds)
    slower = seconds[_AGAIN].ratios(seconds[_PLAIN])
    rows = [_row(name, counted[name], resident[name], counted[_PLAIN], resident[_PLAIN]) for name in _CASES]
    method = (
        "The light MINet on four images of 320², SGD with momentum, BCE + CEL; memory in fresh processes."
        " Activations are the peak of live tensor bytes above parameters, gradients, buffers and optimizer state, total"
        " is the peak with them; both are counted, not estimated. Resident growth is what the process grew by at most"
        " from before the first step (allocator, threads and libraries included). bf16 is emulated by this kind of"
        " processor, so its time says nothing and is not shown. Checkpointing takes"
        f" {statistics.median(slower):.2f} × the time of plain a step (middle half {spread(slower)},"
        f" {rounds} steps of each in rotation, {seconds[_PLAIN].median:.2f} s plain)."
    )
    header = ["case", "activations, MiB", "ratio", "total, MiB", "ratio", "resident growth, MiB", "ratio"]
    return Section("Memory of a training step", method, header, rows, _goals(counted, statistics.median(slower)))


def _row(
    name: str, counted: dict[str, Any], resident: dict[str, Any], plain: dict[str, Any], plain_resident: dict[str, Any]
) -> list[str]:
    pairs = (
        (counted["activations"], plain["activations"]),
        (counted["total"], plain["total"]),
        (resident["resident"], plain_resident["resident"]),
    )
    return [name, *(text for own, other in pairs for text in (f"{own / _MEBI:.0f}", f"{own / other:.3f}"))]


def _goals(counted: dict[str, dict[str, Any]], slower: float) -> list[Goal]:
    def ratio(case: str, figure: str) -> float:
        return float(counted[case][figure] / counted[_PLAIN][figure])

    aims = (
        ("activations with checkpointing at most 0.40 of plain", ratio(_AGAIN, "activations"), 0.40),
        ("activations with bf16 and checkpointing at most 0.25 of plain", ratio(_BOTH, "activations"), 0.25),
        ("total with bf16 and checkpointing at most 0.376 of plain", ratio(_BOTH, "total"), 0.376),
        ("checkpointing at most 1.40 × the time of plain", slower, 1.40),
    )
    return [Goal(text, f"{value:.3f}", value <= limit) for text, value, limit in aims]


def _step(checkpointing: str) -> Turn:
    trainee = Trainee(checkpointing, is_bf16=False)

    def take() -> float:
        begin = perf_counter()
        trainee.step()
        return perf_counter() - begin

    return take


def _in_fresh_process(options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory_case", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
