"""Training beside other busy processes: what is left of the speed, and what waiting so costs where nobody is."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measuring import Measured, interleave, spread
from benchmarks.report import Section, at_least, at_most
from paceline.core.process import num_cores

FAIR_SHARE, IDLE_COST = 0.8, 1.03
_TURN = Path(__file__).parent / "shared_cores" / "turn.py"
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_OURS, _SPINNING = "Paceline", "Paceline, threads spin (torch's default)"
_LIGHTNING, _BY_HAND = "Lightning Trainer, bare", "hand-written loop"
# GNU's own default, given as a user's setting, which Paceline leaves alone.
_CONTESTANTS = {
    _OURS: ("paceline", {}),
    _SPINNING: ("paceline", {"GOMP_SPINCOUNT": "300000"}),
    _LIGHTNING: ("lightning", {}),
    _BY_HAND: ("torch", {}),
}


def measure(is_quick: bool, names: Sequence[str] = tuple(_CONTESTANTS)) -> Section:
    """Samples per second of each, alone and beside as many busy processes as there are cores."""
    rounds, busy_rounds, seconds = (2, 1, 2.0) if is_quick else (6, 2, 3.0)
    cores = num_cores()
    turns = {name: lambda name=name: 1 / _rate(name, seconds) for name in names}
    idle = interleave(turns, rounds)
    with _busy_processes(cores):
        busy = interleave(turns, busy_rounds)
    fair = cores / (cores + cores)
    kept = {name: 1 / statistics.median(_over(busy[name], idle[name])) for name in names}
    cost = idle[_OURS].ratios(idle[_SPINNING])
    return Section(
        "Shared cores",
        f"The quickstart's net, batches of 64, {cores} threads; alone, then beside {cores} processes that never rest."
        f" The fair share of the cores is then {fair:.2f}. Each turn is a process of its own, {seconds:g} s of steps"
        f" after some of warm-up; {rounds} rounds alone and {busy_rounds} beside others. Alone, the middle half of the"
        f" ratios of sleeping to spinning is {spread(cost)}.",
        ["contestant", "samples/s alone", "beside others", "kept", "of the fair share"],
        [
            [
                name,
                f"{1 / idle[name].median:,.0f}",
                f"{1 / busy[name].median:,.0f}",
                f"{kept[name]:.2f}",
                f"{kept[name] / fair:.2f}",
            ]
            for name in names
        ],
        [
            at_least(f"{_OURS} beside others, of the fair share", kept[_OURS] / fair, FAIR_SHARE, "{:.2f}"),
            at_most(
                "time of a step alone with threads that sleep soon, of spinning", statistics.median(cost), IDLE_COST
            ),
        ],
    )


def _over(busy: Measured, idle: Measured) -> list[float]:
    return [cost / idle.median for cost in busy.costs]


def _rate(name: str, seconds: float) -> float:
    contestant, variables = _CONTESTANTS[name]
    given = {key: value for key, value in os.environ.items() if key not in _WAITING} | variables
    command = [sys.executable, str(_TURN), contestant, str(seconds)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr}")
    return float(done.stdout.split()[-1])


@contextmanager
def _busy_processes(number: int) -> Iterator[None]:
    code = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
