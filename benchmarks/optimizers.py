"""What the fused form of an optimizer saves."""

from __future__ import annotations

import statistics
from time import perf_counter

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.measuring import Turn, interleave, spread
from benchmarks.report import Section, at_least
from paceline.optim.optimizers import make_optimizer

LEAST = 2.5
_TENSORS, _SIZE, _STEPS = 20, 100_000, 20
_LR = 1e-3
_OURS, _PLAIN, _TOGETHER = "as paceline makes it (fused)", "tensor by tensor", "all tensors at once (foreach)"


def measure(is_quick: bool) -> Section:
    """The cost of a step of AdamW in each form."""
    torch.set_num_threads(1)
    rounds = 5 if is_quick else 31
    print("optimizers: AdamW")
    turns = {
        _PLAIN: _turn(AdamW(_parameters(), lr=_LR, weight_decay=0.0, foreach=False)),
        _TOGETHER: _turn(AdamW(_parameters(), lr=_LR, weight_decay=0.0, foreach=True)),
        _OURS: _turn(make_optimizer(AdamW, [{"params": _parameters()}], _LR, 0.0, {})),
    }
    measured = interleave(turns, rounds)
    gains = {name: measured[_PLAIN].ratios(each) for name, each in measured.items()}
    gain = statistics.median(gains[_OURS])
    return Section(
        "AdamW",
        f"One step over {_TENSORS} float32 tensors of {_SIZE:,} elements; {rounds} rounds of {_STEPS} steps.",
        ["form", "µs a step", "times as fast", "middle half"],
        [
            [name, f"{measured[name].median * 1e6:.0f}", f"{statistics.median(ratios):.2f}", spread(ratios)]
            for name, ratios in gains.items()
        ],
        [at_least("fused: faster than tensor by tensor", gain, LEAST)],
    )


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(_SIZE, generator=generator)) for _ in range(_TENSORS)]
    for parameter in made:
        parameter.grad = torch.randn(_SIZE, generator=generator)
    return made


def _turn(optimizer: Optimizer) -> Turn:
    def take() -> float:
        begin = perf_counter()
        for _ in range(_STEPS):
            optimizer.step()
        return (perf_counter() - begin) / _STEPS

    return take
