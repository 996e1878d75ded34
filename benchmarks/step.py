"""What a training step costs around the work itself."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks import contestants
from benchmarks.contestant_process import ContestantProcess
from benchmarks.measuring import Measured, Turn, interleave, spread
from benchmarks.report import Section, at_most

_BY_HAND, _CHECKED, _OURS = "hand-written loop", "hand-written, gradient checked", "paceline train"
_ROUNDS, _ROUNDS_OF_GOALS = (
    11,
    20,
)  # those of the goals need more, since the machine's noise is larger than what is left
_CONTESTANTS = {
    _BY_HAND: "contestants:hand_written",
    _CHECKED: "contestants:hand_written_checked",
    _OURS: "contestants:paceline_command",
    "script, paceline.train()": "contestants:paceline_script",
    "own loop, paceline.train_step": "contestants:paceline_own_loop",
    "own loop, Lightning Fabric": "peers:lightning_fabric",
    "own loop, Accelerate": "peers:accelerate",
    "Ignite": "peers:ignite",
    "MMEngine": "peers:mmengine",
    "Hugging Face Trainer": "peers:hf_trainer",
    "Lightning Trainer": "peers:lightning_trainer",
    "Lightning Trainer, extras off": "peers:lightning_bare",
}


@dataclass(frozen=True)
class _Case:
    name: str
    model: str
    batch: int
    warm_up: int
    steps: int
    limit: float


# The steps of a turn are a multiple of those between two logs, so that every turn logs equally often.
_CASES = (
    _Case("64-64-10 MLP, batch 64", "benchmark_small_mlp", 64, 60, 640, 1.40),
    _Case("784-128-10 MLP, batch 128", "benchmark_mlp", 128, 60, 320, 1.20),
    _Case("small conv net, batch 64", "benchmark_convnet", 64, 20, 40, 1.05),
)


def measure(is_quick: bool) -> Section:
    """The cost of a step in each contestant, for three small networks."""
    rounds, further = (1, 0) if is_quick else (_ROUNDS, _ROUNDS_OF_GOALS)
    rows, goals = [], []
    for case in _CASES:
        measured = _measure(case, rounds, further)
        by_hand = measured[_BY_HAND]
        rows += [_row(case.name, each, by_hand) for each in measured.values()]
        ratio = statistics.median(measured[_OURS].ratios(by_hand))
        goals.append(at_most(f"`paceline train`, of the hand-written loop ({case.name})", ratio, case.limit))
    return Section(
        "A training step",
        "Each contestant does the same steps: batches indexed from one tensor in memory, normalized, fused AdamW, a"
        f" cosine schedule, deterministic algorithms, one thread; {rounds} rounds after a warm-up, then {further}"
        " of the hand-written loops and `paceline train` alone. Each contestant has a process of its own."
        f" `paceline train` logs every {contestants.LOG_EVERY_STEPS} steps to a terminal with its progress bar,"
        " to `metrics.jsonl` and to TensorBoard, and checks every gradient. The other frameworks are set up as their"
        " documentation shows, with their defaults: MMEngine logs every 10 steps to a terminal and a file, the Trainers"
        " of Hugging Face and Lightning draw their bars, and Hugging Face's clips gradients. The loops, Fabric,"
        " Accelerate and Ignite log and check nothing.",
        ["contestant", "network", "µs a step", "µs more", "ratio", "middle half"],
        rows,
        goals,
    )


def _measure(case: _Case, rounds: int, further: int) -> dict[str, Measured]:
    with ExitStack() as stack:
        turns: dict[str, Turn] = {}
        for name, place in _CONTESTANTS.items():
            process = ContestantProcess(place, case.model, case.batch, case.warm_up, case.steps)
            turns[name] = stack.enter_context(process).turn
        measured = interleave(turns, rounds)
        again = interleave({name: turns[name] for name in (_BY_HAND, _CHECKED, _OURS)}, further)
        return measured | {name: Measured(name, measured[name].costs + each.costs) for name, each in again.items()}


def _row(network: str, measured: Measured, by_hand: Measured) -> list[str]:
    ratios = measured.ratios(by_hand)
    more = statistics.median(a - b for a, b in zip(measured.costs, by_hand.costs, strict=False))
    return [
        measured.name,
        network,
        f"{measured.median * 1e6:.0f}",
        f"{more * 1e6:.0f}",
        f"{statistics.median(ratios):.2f}",
        spread(ratios),
    ]
