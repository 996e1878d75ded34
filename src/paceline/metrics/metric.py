"""The evaluation contract for metrics: a state for each batch, folded in the order of the batches.

Integer tensors add up, which no order can change. Floating-point tensors are never added here: they are joined end
to end in index order and reduced once, by `Metric.compute`. So a metric depends on the samples alone, not on the
processes that saw them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.data.batch import Batch

State = dict[str, Tensor]
"""What a metric keeps of one batch, on the CPU: int64 tensors to add, float tensors to join along their first."""
Figures = dict[str, Any]
"""Named results: floats, or tensors such as a confusion matrix."""


class Metric(Protocol):
    """Measures batches one by one and turns their folded states into values.

    One that measures through others has them as `wrapped`, so that these are asked for their directions too.
    """

    @property
    def higher_is_better(self) -> bool | Mapping[str, bool]:
        """Whether more is better: of all values, or of each by its name; one not named is only reported.

        A user's metric may leave it out as long as no checkpoint is kept by its values and none is expected.
        """
        ...

    def update(self, predictions: Any, batch: Batch) -> State:
        """The state of one batch."""
        ...

    def compute(self, state: State) -> Figures:
        """The results for all batches together."""
        ...


def is_higher_better(name: str, metrics: Iterable[Metric]) -> bool | None:
    """Whether a higher value of that name is better, as its metric says; None if no metric reports it.

    What a metric says of all its values counts where it is the only one that may be meant; else it is a ValueError
    that names the classes which have to say more.
    """
    reported = name.removeprefix("averaged_")
    answers: dict[str, bool | None] = {}
    for metric in _unwrapped(metrics):
        declared = getattr(metric, "higher_is_better", None)
        if isinstance(declared, Mapping):
            if isinstance(found := declared.get(reported), bool):
                return found
        else:
            answers[type(metric).__name__] = declared if isinstance(declared, bool) else None
    agreed = set(answers.values())
    if len(agreed) <= 1 and None not in agreed:
        return agreed.pop() if agreed else None
    classes = " or ".join(answers)
    raise ValueError(
        f"no metric says whether a higher {name!r} is better; add the class attribute higher_is_better (True, False, or"
        f' a mapping such as {{"{reported}": False}}) to {classes}'
    )


def declared_values(metrics: Iterable[Metric]) -> list[str]:
    """The names of all values that metrics declare one by one."""
    declared = (getattr(metric, "higher_is_better", None) for metric in _unwrapped(metrics))
    return [name for each in declared if isinstance(each, Mapping) for name in each]


def _unwrapped(metrics: Iterable[Metric]) -> Iterator[Metric]:
    for metric in metrics:
        yield metric
        yield from _unwrapped(getattr(metric, "wrapped", ()))


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
