"""Trust ratios, held against the formula by hand and written out tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.checkpoint.state import load_optimizer, optimizer_tree
from paceline.optim.optimizers import add_trust_ratio


def parameter(values: list[float], gradient: list[float] | None) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values, dtype=torch.float64))
    made.grad = None if gradient is None else torch.tensor(gradient, dtype=torch.float64)
    return made


def near(expected: list[float]) -> Any:
    """What equals these numbers to rounding."""
    return pytest.approx(expected, rel=1e-7, abs=1e-9)


def trusted(optimizer: Optimizer, **options: Any) -> Optimizer:
    add_trust_ratio(optimizer, **options)
    return optimizer


# ‖w‖ = 5, ‖g‖ = 1, decay 0.1: the ratio is 0.02·5 / (1 + 0.1·5) = 1/15; gradient and decay together are (0.9, 1.2).
@pytest.mark.parametrize(
    ("lr", "clip", "expected"),
    [
        (0.1, True, [2.94, 3.92]),  # min(1/1.5, 1) = 2/3 of the gradient
        (0.01, True, [2.991, 3.988]),  # 6.67 is cut to 1
        (0.1, False, [2.994, 3.992]),  # 1/15
    ],
)
def test_by_hand(lr: float, clip: bool, expected: list[float]) -> None:
    weight = parameter([3.0, 4.0], [0.6, 0.8])
    trusted(SGD([weight], lr=lr, weight_decay=0.1), coefficient=0.02, clip=clip, eps=0.0).step()
    assert weight.tolist() == near(expected)


def test_eps_is_in_the_denominator() -> None:
    weight = parameter([3.0, 4.0], [0.6, 0.8])
    trusted(SGD([weight], lr=1.0), coefficient=0.1, clip=False, eps=1.0).step()
    assert weight.tolist() == near([3 - 0.25 * 0.6, 4 - 0.25 * 0.8])  # 0.1·5 / (1 + 1)


def test_weights_of_zero_take_the_gradient_as_it_is() -> None:
    weight = parameter([0.0, 0.0], [0.6, 0.8])
    trusted(SGD([weight], lr=0.5, weight_decay=0.1), clip=False).step()
    assert weight.tolist() == near([-0.3, -0.4])


def test_a_gradient_of_zero_moves_nothing() -> None:
    still, absent = parameter([3.0, 4.0], [0.0, 0.0]), parameter([3.0, 4.0], None)
    trusted(SGD([still, absent], lr=0.5, weight_decay=0.1)).step()
    assert still.tolist() == near([3.0, 4.0])
    assert absent.tolist() == near([3.0, 4.0])


def test_a_learning_rate_of_zero_moves_nothing() -> None:
    weight = parameter([3.0, 4.0], [0.6, 0.8])
    trusted(SGD([weight], lr=0.0, weight_decay=0.1)).step()
    assert weight.tolist() == near([3.0, 4.0])


def test_each_group_keeps_its_decay() -> None:
    groups = [
        {"params": [parameter([3.0, 4.0], [0.6, 0.8])], "weight_decay": 0.1},
        {"params": [parameter([3.0, 4.0], [0.6, 0.8])], "weight_decay": 0.0},
    ]
    optimizer = trusted(SGD(groups, lr=0.1), clip=False, eps=0.0)
    optimizer.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["params"][0].tolist() == near([2.994, 3.992])
    assert optimizer.param_groups[1]["params"][0].tolist() == near([3 - 0.006, 4 - 0.008])  # 0.02·5 / 1 = 0.1


def test_optimizers_without_decay_are_served() -> None:
    weight = parameter([3.0, 4.0], [0.6, 0.8])
    optimizer = trusted(torch.optim.Rprop([weight], lr=0.1))
    optimizer.step()
    assert "weight_decay" not in optimizer.param_groups[0]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), decay=st.sampled_from([0.0, 0.05]), clip=st.booleans(), kind=st.integers(0, 2))
def test_equal_to_scaling_each_gradient_beforehand(seed: int, decay: float, clip: bool, kind: int) -> None:
    make: Callable[..., Optimizer] = [
        lambda weights, decay: SGD(weights, lr=0.3, momentum=0.9, weight_decay=decay),
        lambda weights, decay: Adam(weights, lr=0.3, weight_decay=decay),
        lambda weights, decay: AdamW(weights, lr=0.3, weight_decay=decay),
    ][kind]
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,), (2, 2, 3, 3)]
    ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in shapes]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    optimizer, reference = trusted(make(ours, decay), clip=clip), make(theirs, 0.0)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            gradient = torch.randn(one.shape, dtype=torch.float64, generator=generator)
            one.grad = gradient.clone()
            local = 0.02 * other.detach().norm() / (gradient.norm() + decay * other.detach().norm() + 1e-8)
            scale = min(float(local) / 0.3, 1.0) if clip else float(local)
            other.grad = (gradient + decay * other.detach()) * scale
        optimizer.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_resumes_to_the_bit_without_state_of_its_own() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    inputs = torch.randn(8, 6, 4)

    def run(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(inputs[step]).square().sum().backward()
            optimizer.step()

    def fresh(model: nn.Module) -> Optimizer:
        return trusted(SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01))

    half, whole = nn.Linear(4, 3), nn.Linear(4, 3)
    half.load_state_dict(model.state_dict())
    whole.load_state_dict(model.state_dict())
    run(whole, fresh(whole), range(8))
    first = fresh(half)
    run(half, first, range(4))
    tree = optimizer_tree(first, half)
    assert tree["kind"] == "SGD"
    assert set(tree["state"]["weight"]) == {"momentum_buffer"}
    second = fresh(half)
    load_optimizer(second, half, tree)
    run(half, second, range(4, 8))
    assert torch.equal(half.weight, whole.weight)
    assert torch.equal(half.bias, whole.bias)


def lars_of_mae(weight: torch.Tensor, gradients: list[torch.Tensor], lr: float) -> torch.Tensor:
    """MAE's LARS without weight decay, as in its linear probing: matrices have a trust ratio, vectors have none."""
    now, momentum = weight.clone(), torch.zeros_like(weight)
    for gradient in gradients:
        ratio = 0.001 * now.norm() / gradient.norm() if now.ndim > 1 else 1.0
        momentum = 0.9 * momentum + ratio * gradient
        now = now - lr * momentum
    return now


def test_without_clip_and_vectors_it_is_the_lars_of_mae() -> None:
    source = torch.Generator().manual_seed(0)
    for shape in ((5, 7), (5,), (3, 2, 2)):
        weight, *gradients = torch.randn(7, *shape, generator=source, dtype=torch.float64).unbind()
        trained = nn.Parameter(weight.clone())
        optimizer = SGD([trained], lr=3.0, momentum=0.9)
        add_trust_ratio(optimizer, coefficient=0.001, clip=False, eps=0.0, exclude_1d=True)
        for gradient in gradients:
            trained.grad = gradient.clone()
            optimizer.step()
        torch.testing.assert_close(trained.detach(), lars_of_mae(weight, gradients, 3.0), rtol=1e-12, atol=1e-14)
