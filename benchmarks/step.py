"""What a training step costs around the work itself."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import contestants, nets
from benchmarks.contest import Contest
from benchmarks.measuring import Measured, Turn, interleave, spread
from benchmarks.report import Goal, Section

LIMIT = 1.10
_WARM_UP = 60
_BY_HAND, _OURS = "hand-written loop", "paceline train"
_CONTESTANTS: dict[str, Callable[[Contest], None]] = {
    _BY_HAND: contestants.hand_written,
    _OURS: contestants.paceline_command,
    "paceline.train_step in one's own loop": contestants.paceline_own_loop,
    "Lightning Trainer": contestants.lightning_trainer,
    "Lightning Trainer, all extras off": contestants.lightning_bare,
    "Lightning Fabric": contestants.lightning_fabric,
    "Accelerate": contestants.accelerate,
}


def measure(is_quick: bool) -> Section:
    """The cost of a step in each contestant, for two small networks."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rounds = 5 if is_quick else 31
    rows, goals = [], []
    nets_and_steps = (
        ("784-128-10 MLP, batch 128", "benchmark_mlp", 400),
        ("conv net, batch 64", "benchmark_convnet", 40),
    )
    for name, model, steps in nets_and_steps:
        print(f"step: {name}")
        with tempfile.TemporaryDirectory() as folder:
            batch = 128 if model == "benchmark_mlp" else 64
            contest = Contest(model, batch, _WARM_UP + steps, Path(folder))
            measured = interleave({each: _turn(call, contest) for each, call in _CONTESTANTS.items()}, rounds)
        by_hand = measured[_BY_HAND]
        rows += [_row(name, each, by_hand) for each in measured.values()]
        ratio = statistics.median(measured[_OURS].ratios(by_hand))
        goals.append(Goal(f"paceline train at most {LIMIT:.2f} × the loop ({name})", f"{ratio:.3f} ×", ratio <= LIMIT))
    return Section(
        "A training step",
        "The same updates in each: batches indexed out of one tensor in memory, normalised, fused AdamW, a cosine"
        f" schedule, deterministic algorithms, one thread; {rounds} rounds, the first {_WARM_UP} steps of each left"
        " out. `paceline train` logs every 20 steps to the terminal (a real one, with its progress bar),"
        " `metrics.jsonl` and TensorBoard, and checks every update's gradient; the hand-written loop and the loops"
        " of one's own log nothing; Lightning's Trainer draws its bar.",
        ["contestant", "network", "µs a step", "µs more", "ratio", "middle half"],
        rows,
        goals,
    )


def _turn(contestant: Callable[[Contest], None], contest: Contest) -> Turn:
    def take() -> float:
        nets.moments.clear()
        contestant(contest)
        moments = nets.moments[_WARM_UP:]
        assert len(nets.moments) == contest.steps
        return (moments[-1] - moments[0]) / (len(moments) - 1)

    return take


def _row(network: str, measured: Measured, by_hand: Measured) -> list[str]:
    ratios = measured.ratios(by_hand)
    more = statistics.median(a - b for a, b in zip(measured.costs, by_hand.costs, strict=True))
    return [
        measured.name,
        network,
        f"{measured.median * 1e6:.0f}",
        f"{more * 1e6:.0f}",
        f"{statistics.median(ratios):.2f}",
        spread(ratios),
    ]
