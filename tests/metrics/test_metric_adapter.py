"""Metrics with `update` and `compute`: bit-identical however batches are spread over processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import RecipeError, TrainingError
from paceline.data.batch import Batch
from paceline.metrics.adapter import GatheredMetric, SummedMetric, as_metric
from paceline.metrics.classification import TopK
from paceline.metrics.metric import State, is_higher_better, merge_states, pack, unpack


class MeanAbsolute:
    """As torchmetrics has them: a state that grows in place."""

    higher_is_better = False

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.total += (preds - target).abs().sum()
        self.count += target.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class Summed(MeanAbsolute):
    sums = ("total", "count")


class Median:
    """One that no sum can replace."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.seen.append((preds - target).flatten())

    def compute(self) -> dict[str, Any]:
        errors = torch.cat(self.seen)
        return {"median": errors.median(), "worst": errors.max().item(), "count": len(errors), "all": errors}


def over_processes(metric: Any, batches: Sequence[tuple[Tensor, Tensor]], processes: int) -> dict[str, Any]:
    """As the engine does it: contiguous batches to each process, their states folded, sent as bytes, folded again."""
    share = -(-len(batches) // processes)
    sent = []
    for rank in range(processes):
        own = batches[rank * share : (rank + 1) * share]
        states: list[State] = [metric.update(p, Batch(id=torch.arange(len(p)), target=t)) for p, t in own]
        sent.append(pack(merge_states(states)))
    computed: dict[str, Any] = metric.compute(merge_states(unpack(each) for each in sent))
    return computed


def batches(sizes: Sequence[int] = (7, 7, 7, 7, 3), side: int = 33) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 1, side, side, generator=generator) * 100, torch.randn(n, side, side, generator=generator))
        for n in sizes
    ]


@pytest.mark.parametrize("made", [MeanAbsolute, Summed])
def test_the_same_bits_on_any_number_of_processes(made: type[MeanAbsolute]) -> None:
    metric, given = as_metric("mae", made()), batches()
    values = [over_processes(metric, given, processes) for processes in (1, 2, 3, 5)]
    assert all(value == values[0] for value in values)
    errors = torch.cat([(preds[:, 0].double() - target.double()).abs().flatten() for preds, target in given])
    assert values[0] == {"mae": pytest.approx(errors.mean().item(), rel=1e-5)}
    assert over_processes(metric, given, 2) == values[0], "a second evaluation starts from nothing"


def test_update_is_called_batch_by_batch_in_order_with_what_was_predicted() -> None:
    class Diary:
        def __init__(self) -> None:
            self.calls: list[tuple[Any, ...]] = []

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.calls.append((preds.dtype, tuple(preds.shape), target.dtype, target.flatten().tolist()))

        def compute(self) -> float:
            diaries.append(self.calls)
            return 0.0

    diaries: list[Any] = []
    kinds = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float64, torch.bfloat16]
    given = [(torch.ones(2, 3), torch.tensor([0, 1]).to(kind)) for kind in kinds]
    given.append((torch.ones(2, 3), torch.tensor([0, 2**40 + 1])))
    over_processes(GatheredMetric("diary", Diary()), given, 3)
    expected: list[Any] = [(torch.float32, (2, 3), kind, [0, 1]) for kind in kinds]
    assert diaries == [[*expected, (torch.float32, (2, 3), torch.int64, [0, 2**40 + 1])]]


def test_dicts_tensors_and_counts_are_reported_by_name() -> None:
    given = batches((2, 1), side=2)
    computed = over_processes(as_metric("errors", Median()), given, 2)
    errors = torch.cat([(preds[:, 0] - target).flatten() for preds, target in given])
    assert (computed["median"], computed["worst"], computed["count"]) == (errors.median(), errors.max(), 12)
    assert type(computed["count"]) is int
    assert torch.equal(computed["all"], errors)


def test_lists_hold_samples_of_different_sizes() -> None:
    metric = as_metric("mae", MeanAbsolute())
    preds, target = [torch.zeros(2, 2), torch.zeros(3, 1)], [torch.ones(2, 2), torch.full((3, 1), 3.0)]
    state = metric.update(preds, Batch(id=torch.arange(2), mask=target))
    assert metric.compute(state) == {"mae": pytest.approx(13 / 7)}


def test_the_direction_is_that_of_the_metric() -> None:
    metrics = [as_metric("mae", MeanAbsolute()), as_metric("errors", Median())]
    assert is_higher_better("mae", metrics[:1]) is False
    with pytest.raises(ValueError, match="Median"):
        is_higher_better("median", metrics)


def test_metrics_of_the_contract_stay_as_they_are() -> None:
    top = TopK()
    assert as_metric("top_k", top) is top


def test_what_is_summed_begins_at_zero() -> None:
    class Wrong(Summed):
        def __init__(self) -> None:
            super().__init__()
            self.count = 1

    assert isinstance(as_metric("mae", Summed()), SummedMetric)
    with pytest.raises(RecipeError, match=r"metric mae: sums names count, which is 1"):
        as_metric("mae", Wrong())
    with pytest.raises(RecipeError, match="metric mae: sums names total, which does not exist"):
        as_metric("mae", type("Bare", (), {"sums": "total", "update": print, "compute": lambda self: 0})())


def test_mistakes_in_a_metric_name_it_and_its_line() -> None:
    class Broken(MeanAbsolute):
        def update(self, preds: Tensor, target: Tensor) -> None:
            raise KeyError("lost")

    class Texts(MeanAbsolute):
        def compute(self) -> Any:
            return "good"

    given = batches((2,), side=2)
    with pytest.raises(TrainingError, match=rf"metric mine: .*{Path(__file__).name}:\d+: KeyError: 'lost'"):
        over_processes(as_metric("mine", Broken()), given, 1)
    with pytest.raises(TrainingError, match="metric mine: compute gave str"):
        over_processes(as_metric("mine", Texts()), given, 1)
    with pytest.raises(TrainingError, match="metric mine: got predictions as dict"):
        as_metric("mine", MeanAbsolute()).update({}, Batch(id=torch.arange(1), target=torch.zeros(1)))
    with pytest.raises(RecipeError, match="metric mine: its function gave nothing"):
        as_metric("mine", None)
