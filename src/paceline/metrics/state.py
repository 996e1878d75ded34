"""The evaluation contract for figures: a state for each batch, folded in the order of the batches.

Integer tensors add up, which no order can change. Floating-point tensors are never added here: they are joined end
to end in index order and reduced once, by `Metric.figures`. So a figure depends on the samples alone, not on the
processes that saw them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.data.batch import Batch

State = dict[str, Tensor]
"""What a metric keeps of one batch, on the CPU: int64 tensors to add, float tensors to join along their first."""
Figures = dict[str, Any]
"""Named results: floats, or tensors such as a confusion matrix."""


_ERRORS = ("mae", "ber", "unseen_classes")


def is_lower_better(figure: str, losses: Container[str]) -> bool:
    """Whether the less of a figure the better: of the loss, of those by these names, and of errors."""
    measured = figure.removeprefix("averaged_")
    return measured == "loss" or measured in losses or measured in _ERRORS or measured.startswith("absent.")


class Metric(Protocol):
    """Measures batches one by one and turns their folded states into figures."""

    def measure(self, predictions: Any, batch: Batch) -> State:
        """The state of one batch."""
        ...

    def figures(self, state: State) -> Figures:
        """The results for all batches together."""
        ...


class Folding:
    """Takes the states of batches in their order and keeps no more of them than the result needs."""

    def __init__(self) -> None:
        self._sums: State = {}
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, state: State) -> None:
        """Take the state of the next batch."""
        for name, value in state.items():
            if value.is_floating_point():
                self._parts.setdefault(name, []).append(value)
            elif name in self._sums:
                self._sums[name] = self._sums[name] + value
            else:
                self._sums[name] = value

    def result(self) -> State:
        """The state of all batches together."""
        return self._sums | {name: torch.cat(parts) for name, parts in self._parts.items()}


def fold(states: Iterable[State]) -> State:
    """One state for all batches; `states` come in the order of the batches."""
    folding = Folding()
    for state in states:
        folding.add(state)
    return folding.result()


def pack(state: State) -> Tensor:
    """A state as bytes that travel between processes, without pickle; nothing for no state."""
    if not state:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(save(state)), dtype=torch.uint8)


def unpack(packed: Tensor) -> State:
    """The state that `pack` made into bytes."""
    return dict(sorted(load(packed.numpy().tobytes()).items())) if len(packed) else {}
