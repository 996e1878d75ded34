"""Losses of torch and of users: divided by the samples of a whole step, whatever its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import DataError, RecipeError, TrainingError
from paceline.data.batch import Batch
from paceline.losses.adapter import Criterion, StatefulCriterion, as_loss, comparable
from paceline.losses.loss_term import Loss


def batch_of(samples: int, **fields: Tensor) -> Batch:
    return Batch(id=torch.arange(samples), **fields)


def fraction(loss: Loss, outputs: Tensor, target: Tensor, cuts: list[int], field: str = "target") -> Tensor:
    """The loss of a step that is cut into micro-batches of these sizes."""
    terms = [
        loss(part, batch_of(len(part), **{field: truth}))
        for part, truth in zip(torch.split(outputs, cuts), torch.split(target, cuts), strict=True)
    ]
    return sum(term.numerator for term in terms) / sum(torch.as_tensor(term.denominator) for term in terms)  # type: ignore[return-value]


def berhu(output: Tensor, target: Tensor, threshold: float = 0.5) -> Tensor:
    error = (output - target).abs()
    return torch.where(error <= threshold, error, (error**2 + threshold**2) / (2 * threshold)).mean()


WHOLE: list[tuple[str, Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = [
    ("l1", nn.L1Loss(), lambda o, t: (o - t).abs().mean()),
    ("summed", nn.MSELoss(reduction="sum"), lambda o, t: ((o - t) ** 2).sum() / len(o)),
    ("each", nn.SmoothL1Loss(reduction="none"), F.smooth_l1_loss),
    ("function", berhu, berhu),
    ("bound", partial(berhu, threshold=0.1), lambda o, t: berhu(o, t, 0.1)),
    ("functional", partial(F.l1_loss, reduction="sum"), lambda o, t: (o - t).abs().sum() / len(o)),
]


@pytest.mark.parametrize(("name", "function", "whole"), WHOLE, ids=[case[0] for case in WHOLE])
@pytest.mark.parametrize("cuts", [[10], [4, 4, 2], [1, 9]])
def test_micro_batches_give_the_loss_and_the_gradient_of_the_whole(
    name: str, function: Any, whole: Any, cuts: list[int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(10, 1, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.randn(10, 1, 3, 4, dtype=torch.float64, generator=generator)
    expected = whole(outputs, target)
    (wanted,) = torch.autograd.grad(expected, outputs)
    found = fraction(as_loss(name, function), outputs, target, cuts)
    (gradient,) = torch.autograd.grad(found, outputs)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-18)


def test_ignored_pixels_are_exact_as_a_sum_and_weighted_by_samples_as_a_mean() -> None:
    outputs, target = torch.randn(4, 3, 2, 2, dtype=torch.float64), torch.randint(0, 3, (4, 2, 2))
    target[0] = 255
    target[1, 0] = 255
    whole = F.cross_entropy(outputs, target, ignore_index=255, reduction="sum") / 4
    summed = as_loss("ce", nn.CrossEntropyLoss(ignore_index=255, reduction="sum"))
    torch.testing.assert_close(fraction(summed, outputs, target.byte(), [2, 2], "mask"), whole, rtol=1e-13, atol=0)
    mean = as_loss("ce", nn.CrossEntropyLoss(ignore_index=255))
    halves = [F.cross_entropy(outputs[s], target[s], ignore_index=255) for s in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(fraction(mean, outputs, target.byte(), [2, 2], "mask"), sum(halves) / 2)


SHAPES = [
    ((5, 1), (5,), (5, 1), torch.float32, torch.float32),
    ((5, 1, 2, 3), (5, 2, 3), (5, 1, 2, 3), torch.uint8, torch.float32),
    ((5, 2, 3), (5, 1, 2, 3), (5, 2, 3), torch.float64, torch.float32),
    ((5, 4), (5,), (5,), torch.int32, torch.int64),
    ((1, 5), (1,), (1,), torch.int64, torch.int64),
    ((5, 4, 2, 3), (5, 2, 3), (5, 2, 3), torch.uint8, torch.int64),
    ((6, 2), (2, 6), (2, 6), torch.float32, torch.float32),
]


@pytest.mark.parametrize(("output", "given", "expected", "dtype", "becomes"), SHAPES)
def test_targets_are_compared_element_by_element_or_as_class_numbers(
    output: tuple[int, ...], given: tuple[int, ...], expected: tuple[int, ...], dtype: torch.dtype, becomes: torch.dtype
) -> None:
    found = comparable(torch.ones(given, dtype=dtype), torch.zeros(output))
    assert (found.shape, found.dtype) == (expected, becomes)


def test_the_target_is_the_first_of_the_fields() -> None:
    outputs = torch.zeros(2, 1)
    fields = {"mask": torch.full((2, 1), 3.0), "label": torch.full((2, 1), 2.0), "target": torch.full((2, 1), 1.0)}
    values = []
    while fields:
        values.append(float(Criterion("l1", nn.L1Loss())(outputs, batch_of(2, **fields)).numerator) / 2)
        fields.popitem()
    assert values == [1.0, 2.0, 3.0]
    with pytest.raises(DataError, match="target, label, mask"):
        Criterion("l1", nn.L1Loss())(outputs, batch_of(2))


def test_half_precision_outputs_are_compared_as_float32() -> None:
    term = Criterion("l1", nn.L1Loss())(torch.ones(4, 1, dtype=torch.bfloat16), batch_of(4, target=torch.zeros(4)))
    assert term.numerator.dtype == torch.float32


def test_what_a_module_remembers_is_saved_and_its_parameters_are_refused() -> None:
    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("heat", torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - target).abs().mean()

    loss = as_loss("drifting", Drifting())
    assert isinstance(loss, StatefulCriterion)
    loss.load_state_dict({"heat": torch.tensor(3.0)})
    assert loss.state_dict()["heat"] == 3.0
    assert not isinstance(as_loss("l1", nn.L1Loss()), StatefulCriterion)
    learned = Drifting()
    learned.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(RecipeError, match="parameters"):
        as_loss("learned", learned)


def test_mistakes_in_a_loss_name_it_and_its_line() -> None:
    def broken(output: Tensor, target: Tensor) -> Tensor:
        return output.no_such_method()  # type: ignore[attr-defined,no-any-return]

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(TrainingError, match=rf"loss mine: .*{Path(__file__).name}:{line}: AttributeError: .*no_such"):
        as_loss("mine", broken)(torch.zeros(2), batch_of(2, target=torch.zeros(2)))
    for wrong, found in ((lambda o, t: o - t, r"\[2\]"), (lambda o, t: 3.0, "float")):
        with pytest.raises(TrainingError, match=rf"loss mine: gave .*{found}"):
            as_loss("mine", wrong)(torch.zeros(2), batch_of(2, target=torch.zeros(2)))
    with pytest.raises(RecipeError, match="loss mine: its function gave nothing"):
        as_loss("mine", None)
    with pytest.raises(RecipeError, match="'median'"):
        as_loss("mine", partial(F.l1_loss, reduction="median"))


@pytest.mark.parametrize(
    ("output", "target", "cure"),
    [
        ((torch.zeros(2, 3),), torch.tensor([0, 1]), "output tuple.*one tensor"),
        (torch.zeros(2, 3, 1, 1), torch.tensor([0, 1]), r"\[N, 3\]: flatten"),
        (torch.zeros(2, 3), torch.tensor([0, 7]), "from 0 to 7, expected 0 to 2"),
        (torch.zeros(2, 3, 4, 4), torch.full((2, 4, 4), 9), "from 9 to 9, expected 0 to 2"),
    ],
)
def test_what_is_wrong_with_shapes_is_named(output: Any, target: Tensor, cure: str) -> None:
    with pytest.raises(TrainingError, match=f"loss mine: .*{cure}"):
        as_loss("mine", F.cross_entropy)(output, batch_of(2, target=target))
