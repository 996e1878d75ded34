"""What measuring a saliency map costs beside PySODMetrics, which computes the same metrics."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.measuring import interleave, spread
from benchmarks.report import Goal, Section
from benchmarks.saliency_turn import HEIGHT, NUM_IMAGES, WIDTH

REFERENCE = "PYSODMETRICS_PYTHON"
TIMES = 3.0


def measure(is_quick: bool) -> Section:
    """Processor time an image; of Paceline alone unless PYSODMETRICS_PYTHON names an interpreter that has the other."""
    rounds = 1 if is_quick else 7
    other = os.environ.get(REFERENCE)
    turns = {"paceline": lambda: _milliseconds(sys.executable, "paceline")}
    if other:
        turns["pysodmetrics"] = lambda: _milliseconds(other, "pysodmetrics")
    measured = interleave(turns, rounds)
    rows = [[each.name, f"{each.median:.2f}"] for each in measured.values()]
    goals = []
    if other:
        ratios = measured["pysodmetrics"].ratios(measured["paceline"])
        ratio = statistics.median(ratios)
        goals = [Goal(f"at least {TIMES:g} times as fast", f"{ratio:.2f} ({spread(ratios)})", ratio >= TIMES)]
    return Section(
        "Saliency metrics",
        f"All eleven metrics of {NUM_IMAGES} noisy predictions of {HEIGHT} x {WIDTH}: CPU time of one thread,"
        f" median of {rounds} rounds in turns. Paceline keeps freed memory, as in a run. `{REFERENCE}` is a Python with"
        " pysodmetrics 1.6.2.",
        ["package", "ms an image"],
        rows,
        goals,
    )


def _milliseconds(python: str, contestant: str) -> float:
    script = Path(__file__).with_name("saliency_turn.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, str(script), contestant], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{python} {script} {contestant} ended with {done.returncode}: {done.stderr}")
    return float(done.stdout)
