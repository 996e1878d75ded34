"""Measuring and clipping gradients, held against torch's own function."""

import copy
import math

import pytest
import torch
from torch import nn

from paceline.optim.clipping import NormClip, Unclipped


def model(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A net with gradients, of which one layer has none."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 16, 5)).to(dtype)
    net.append(nn.Linear(5, 5, dtype=dtype).requires_grad_(False))
    net(torch.randn(6, 2, 6, 6, dtype=dtype)).square().mean().mul(scale).backward()
    return net


@pytest.mark.parametrize("limit", [1e-4, 0.5, 1e4])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_clipping_is_that_of_torch(limit: float, scale: float) -> None:
    ours = model(scale)
    reference = copy.deepcopy(ours)
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        other.grad = None if one.grad is None else one.grad.clone()
    norm = NormClip(limit)(list(ours.parameters()))
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
    assert torch.equal(norm, expected)
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert torch.equal(one.grad, other.grad)


def test_the_norm_is_the_root_of_all_squares_together() -> None:
    net = model(dtype=torch.float64)
    squares = [x * x for p in net.parameters() if p.grad is not None for x in p.grad.flatten().tolist()]
    assert Unclipped()(list(net.parameters())).item() == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-12)


def test_measuring_changes_nothing() -> None:
    net = model()
    before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    Unclipped()(list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), before, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(gradient, parameter.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("measure", [Unclipped(), NormClip(1.0)])
def test_without_gradients_the_norm_is_zero(measure: Unclipped | NormClip) -> None:
    assert measure(list(nn.Linear(2, 2).parameters())).item() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("measure", [Unclipped(), NormClip(1.0)])
def test_what_is_not_finite_shows_in_the_norm(measure: Unclipped | NormClip, value: float) -> None:
    net = model()
    gradient = next(net.parameters()).grad
    assert gradient is not None
    gradient.view(-1)[7] = value
    assert not math.isfinite(measure(list(net.parameters())).item())
