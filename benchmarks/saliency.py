"""What measuring a saliency map costs beside PySODMetrics, which computes the same metrics."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.measuring import interleave, spread
from benchmarks.report import Section, at_least
from benchmarks.saliency_turn import HEIGHT, NUM_IMAGES, WIDTH

# In an environment of its own, which `make bench` makes, because it needs an older numpy.
_REFERENCE = Path(sys.prefix) / "pysodmetrics" / "bin" / "python"
TIMES = 3.0


def measure(is_quick: bool) -> Section:
    """Processor time an image; of Paceline alone where PySODMetrics is not installed."""
    rounds = 1 if is_quick else 5
    turns = {"paceline": lambda: _milliseconds(sys.executable, "paceline")}
    if _REFERENCE.exists():
        turns["pysodmetrics"] = lambda: _milliseconds(str(_REFERENCE), "pysodmetrics")
    measured = interleave(turns, rounds)
    ours, goals = measured["paceline"], []
    rows = [[each.name, f"{each.median:.2f}", spread(each.ratios(ours))] for each in measured.values()]
    if "pysodmetrics" in measured:
        ratios = measured["pysodmetrics"].ratios(ours)
        goals = [at_least("faster than PySODMetrics", statistics.median(ratios), TIMES)]
    return Section(
        "Saliency metrics",
        f"All eleven metrics of {NUM_IMAGES} noisy predictions of {HEIGHT} x {WIDTH}: CPU time of one thread,"
        f" median of {rounds} rounds in turns. Paceline keeps freed memory, as in a run. PySODMetrics has its own"
        " environment.",
        ["package", "ms an image", "middle half of ratios"],
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
