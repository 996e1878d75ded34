"""Metrics as users have them, torchmetrics' among them: `update(preds, target)` and `compute()`.

They are bit-identical on any number of processes: `update` is called batch by batch in the order of the samples, and
what torch computes there uses one thread.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError, TrainingError
from paceline.core.signatures import signature_of
from paceline.core.user_code import user_code
from paceline.data.batch import Batch
from paceline.losses.adapter import Pair, output_and_target, same_shape
from paceline.metrics.metric import Metric, MetricValues, State, pack, unpack


def as_metric(name: str, made: Any) -> Metric:
    """What was registered as a metric, if its `compute` takes a state; else the same behind that contract."""
    for method in ("update", "compute"):
        if not callable(getattr(made, method, None)):
            found = "nothing" if made is None else f"{type(made).__name__}, which has no method {method}"
            raise RecipeError(f"metric {name}: its function gave {found}; expected update(preds, target) and compute()")
    if "state" in signature_of(made.compute).parameters:
        metric: Metric = made
        return metric
    return SummedMetric(name, made) if getattr(made, "sums", ()) else GatheredMetric(name, made)


class MetricAdapter:
    """A metric with a state of its own, of which every use takes a fresh copy."""

    def __init__(self, name: str, metric: Any) -> None:
        self.name = name
        self.pair: Pair = output_and_target
        self._metric = metric
        for part in metric.modules() if isinstance(metric, nn.Module) else ():
            if hasattr(part, "distributed_available_fn"):  # of torchmetrics: it would add up what all processes hold
                part.distributed_available_fn = _never  # type: ignore[assignment]

    @property
    def higher_is_better(self) -> Mapping[str, bool]:
        """As the metric says, of each value by its name; a single one has the name of the metric."""
        declared = getattr(self._metric, "higher_is_better", None)
        return declared if isinstance(declared, Mapping) else {} if declared is None else {self.name: bool(declared)}

    @property
    def wrapped(self) -> Sequence[Any]:
        """The metric, if it declares no direction, so that errors name it."""
        return [] if self.higher_is_better else [self._metric]

    def _pairs(self, predictions: Any, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Predictions and targets of a batch; of lists, which hold samples of different sizes, one after the other."""
        predictions, target = self.pair(predictions, batch)
        if isinstance(predictions, Tensor) and isinstance(target, Tensor):
            yield predictions.detach().cpu(), target.cpu()
        elif isinstance(predictions, list) and isinstance(target, list):
            for one, other in zip(predictions, target, strict=True):
                yield one.detach().cpu().unsqueeze(0), other.cpu().unsqueeze(0)
        else:
            found = f"predictions as {type(predictions).__name__} and targets as {type(target).__name__}"
            raise TrainingError(f"metric {self.name}: got {found}; expected tensors: have the task's predict give one")

    def _updated(self, metric: Any, preds: Tensor, target: Tensor) -> None:
        with user_code(f"metric {self.name}"):
            metric.update(preds, same_shape(target, preds))

    def _computed(self, metric: Any) -> MetricValues:
        with user_code(f"metric {self.name}"):
            value = metric.compute()
        named = value if isinstance(value, Mapping) else {self.name: value}
        return {str(name): self._value(each) for name, each in named.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.item() if value.numel() == 1 else value.detach().cpu()
        try:
            return value if type(value) is int else float(value)
        except (TypeError, ValueError) as error:
            expected = "expected a number, a tensor, or a dict of them"
            raise TrainingError(f"metric {self.name}: compute gave {type(value).__name__}; {expected}") from error


class GatheredMetric(MetricAdapter):
    """Keeps all predictions and targets, and shows them to the metric at the end, batch by batch, in order."""

    def describe(self) -> str:
        """What exactness costs."""
        advice = 'declare `sums = ("total", "count")`, the names of what it adds up, to keep these alone'
        return f"metric {self.name}: predictions and targets of a whole split are kept in memory; {advice}"

    def update(self, predictions: Any, batch: Batch) -> State:
        """The predictions and targets of one batch, as bytes that travel as floats: those are joined, not added."""
        pairs = {
            f"{side}{index}": tensor.clone(memory_format=torch.contiguous_format)
            for index, pair in enumerate(self._pairs(predictions, batch))
            for side, tensor in zip(("preds", "target"), pair, strict=True)
        }
        data = pack(pairs)
        words = nn.functional.pad(data, (0, -len(data) % 8)).view(torch.float64)
        return {"words": words, "sizes": torch.tensor([[len(data), len(words)]], dtype=torch.float64)}

    def compute(self, state: State) -> MetricValues:
        metric = copy.deepcopy(self._metric)
        sizes = state["sizes"].long().tolist()
        batches = torch.split(state["words"], [number for _, number in sizes])
        with one_thread(), torch.no_grad():
            for (length, _), words in zip(sizes, batches, strict=True):
                tensors = unpack(words.view(torch.uint8)[:length])
                for index in range(len(tensors) // 2):
                    self._updated(metric, tensors[f"preds{index}"], tensors[f"target{index}"])
            return self._computed(metric)


class SummedMetric(MetricAdapter):
    """Keeps of each batch what the metric adds up, its attributes `sums`; they begin at 0."""

    def __init__(self, name: str, metric: Any) -> None:
        super().__init__(name, metric)
        self._sums: Sequence[str] = [metric.sums] if isinstance(metric.sums, str) else list(metric.sums)
        for each in self._sums:
            if not hasattr(metric, each) or bool(torch.as_tensor(getattr(metric, each)).any()):
                found = f"is {getattr(metric, each)!r}" if hasattr(metric, each) else "does not exist"
                where = f"expected to begin at 0, as `self.{each} = 0.0` in __init__"
                raise RecipeError(f"metric {name}: sums names {each}, which {found}; {where}")

    def update(self, predictions: Any, batch: Batch) -> State:
        """What one batch adds to each sum: whole numbers to be added, floats to be joined."""
        metric = copy.deepcopy(self._metric)
        for preds, target in self._pairs(predictions, batch):
            self._updated(metric, preds, target)
        added = {name: torch.as_tensor(getattr(metric, name)).detach().cpu() for name in self._sums}
        return {
            name: value.double().unsqueeze(0) if value.is_floating_point() else value.long()
            for name, value in added.items()
        }

    def compute(self, state: State) -> MetricValues:
        metric = copy.deepcopy(self._metric)
        for name in self._sums:
            total = state[name]
            if total.is_floating_point():
                rows = list(total)
                total = sum(rows[1:], start=rows[0])  # in the order of the batches
            setattr(metric, name, total if isinstance(getattr(metric, name), Tensor) else total.item())
        with one_thread(), torch.no_grad():
            return self._computed(metric)


def _never() -> bool:
    return False


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations use one thread inside: sums of floats depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
