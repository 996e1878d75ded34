"""The metric contract: `update` gives the state of one batch, `compute` turns the states of all batches into values.

Integer tensors of states are summed; no order changes such a sum. Float tensors, and uint8 ones, which hold bytes, are
never summed here: they are concatenated in sample order and reduced once, by `Metric.compute`. So values depend on the
samples alone, not on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.data.batch import Batch
from paceline.losses.loss_term import Loss

State = dict[str, Tensor]
"""What a metric keeps of one batch, on the CPU: int64 tensors to sum, float and uint8 ones to join along dim 0."""
MetricValues = dict[str, Any]
"""Values by name: floats, or tensors such as a confusion matrix."""


class Metric(Protocol):
    """Measures predictions batch by batch.

    A metric that delegates to others lists them as `wrapped`, so that their directions are found too.
    """

    @property
    def higher_is_better(self) -> bool | Mapping[str, bool]:
        """The direction of all values, or of each by name; a value that is not named is only reported.

        Your metric may omit it as long as neither `checkpoint.best` nor `expect` uses its values.
        """
        ...

    def update(self, predictions: Any, batch: Batch) -> State:
        """The state of one batch. Called from several threads at once, so it changes no attribute."""
        ...

    def compute(self, state: State) -> MetricValues:
        """The values over all batches."""
        ...


class LossMetrics:
    """Each loss over all samples, by name, and their weighted sum as "loss".

    A loss whose denominator is 0 is undefined: it is omitted, and "loss" with it.
    """

    def __init__(self, losses: dict[str, Loss], weights: dict[str, float]) -> None:
        self.losses = losses
        self.weights = weights
        self.higher_is_better = dict.fromkeys((*losses, "loss"), False)

    def update(self, predictions: Any, batch: Batch) -> State:
        """Numerator and denominator of each loss, float64 [1]."""
        outputs = predictions.detach() if isinstance(predictions, Tensor) else predictions
        state = {}
        for name, loss in self.losses.items():
            for part, value in loss(outputs, batch)._asdict().items():
                state[f"{name}.{part}"] = torch.tensor([float(value)], dtype=torch.float64)
        return state

    def compute(self, state: State) -> MetricValues:
        values: MetricValues = {}
        for name in self.losses:
            # Python adds in batch order; the order in which torch adds can depend on its threads.
            denominator = sum(state[f"{name}.denominator"].tolist())
            if denominator != 0:
                values[name] = sum(state[f"{name}.numerator"].tolist()) / denominator
        if len(values) == len(self.losses):
            values["loss"] = sum(self.weights[name] * values[name] for name in self.losses)
        return values


@dataclass(frozen=True)
class MetricOf:
    """A metric of a part of the predictions: `select` gives what it gets of predictions and batch."""

    metric: Metric
    select: Callable[[Any, Batch], tuple[Any, Batch]]
    higher_is_better: ClassVar[Mapping[str, bool]] = {}

    @property
    def wrapped(self) -> Sequence[Metric]:
        return [self.metric]

    def update(self, predictions: Any, batch: Batch) -> State:
        return self.metric.update(*self.select(predictions, batch))

    def compute(self, state: State) -> MetricValues:
        return self.metric.compute(state)


@dataclass(frozen=True)
class Rows:
    """Collects rows of all predictions, float64 with the sample's id first, as `rows` gives them for a batch."""

    name: str
    rows: Callable[[Any, Batch], Tensor]
    higher_is_better: ClassVar[Mapping[str, bool]] = {}

    def update(self, predictions: Any, batch: Batch) -> State:
        return {self.name: self.rows(predictions, batch)}

    def compute(self, state: State) -> MetricValues:
        return dict(state)


def is_higher_better(name: str, metrics: Iterable[Metric]) -> bool | None:
    """The direction of the value `name` as its metric declares it; None if no metric reports it.

    A metric with one direction for all its values decides if no other metric contradicts it; otherwise a ValueError
    names the classes that need a mapping.
    """
    reported = name.removeprefix("averaged_")
    answers: dict[str, bool | None] = {}
    for metric in _unwrap(metrics):
        declared = getattr(metric, "higher_is_better", None)
        if isinstance(declared, Mapping):
            if isinstance(found := declared.get(reported), bool):
                return found
        else:
            answers[type(metric).__name__] = declared if isinstance(declared, bool) else None
    directions = set(answers.values())
    if len(directions) <= 1 and None not in directions:
        return directions.pop() if directions else None
    raise ValueError(
        f"no metric declares whether a higher {name!r} is better; add the class attribute higher_is_better (True, False"
        f', or a mapping such as {{"{reported}": False}}) to {" or ".join(answers)}'
    )


def declared_values(metrics: Iterable[Metric]) -> list[str]:
    """The names of all values whose direction is declared by name."""
    declared = (getattr(metric, "higher_is_better", None) for metric in _unwrap(metrics))
    return [name for each in declared if isinstance(each, Mapping) for name in each]


def _unwrap(metrics: Iterable[Metric]) -> Iterator[Metric]:
    for metric in metrics:
        yield metric
        yield from _unwrap(getattr(metric, "wrapped", ()))


class StateAccumulator:
    """Adds up the states of batches, in batch order, without keeping more than the result needs."""

    def __init__(self) -> None:
        self._sums: State = {}
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, state: State) -> None:
        for name, value in state.items():
            if value.is_floating_point() or value.dtype == torch.uint8:
                self._parts.setdefault(name, []).append(value)
            else:
                self._sums[name] = self._sums[name] + value if name in self._sums else value

    def result(self) -> State:
        return self._sums | {name: torch.cat(parts) for name, parts in self._parts.items()}


def merge_states(states: Iterable[State]) -> State:
    """One state for all batches; `states` come in batch order."""
    accumulator = StateAccumulator()
    for state in states:
        accumulator.add(state)
    return accumulator.result()


def pack(state: State) -> Tensor:
    """A state as uint8 [bytes], to send to another process without pickle; empty for an empty state."""
    if not state:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(save(state)), dtype=torch.uint8)


def unpack(packed: Tensor) -> State:
    """The state that `pack` serialized."""
    return dict(sorted(load(packed.numpy().tobytes()).items())) if len(packed) else {}
