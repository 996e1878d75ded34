"""Measuring and clipping gradients, held against torch's and timm's own functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore, destroy_process_group, init_process_group  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from paceline.core.torchvision_ops import import_torchvision
from paceline.optim.clipping import AdaptiveClip, ClipGradNorm, ClipGradValue, NoClip

Clip = NoClip | ClipGradNorm | ClipGradValue | AdaptiveClip
EVERY = [NoClip(), ClipGradNorm(1.0), ClipGradValue(1.0), AdaptiveClip()]


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
    ours, reference = model(scale), model(scale)
    norm = ClipGradNorm(limit)(list(ours.parameters()))
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
    assert torch.equal(norm, expected)
    assert_same_gradients(ours, reference)


@pytest.mark.parametrize("limit", [1e-4, 0.01, 1e4])
def test_clipping_values_is_that_of_torch(limit: float) -> None:
    ours, reference = model(), model()
    before = NoClip()(list(ours.parameters()))
    assert torch.equal(ClipGradValue(limit)(list(ours.parameters())), before)
    torch.nn.utils.clip_grad_value_(reference.parameters(), limit)
    assert_same_gradients(ours, reference)


@pytest.mark.parametrize("factor", [1e-4, 0.01, 10.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_adaptive_clipping_is_that_of_timm(factor: float, scale: float) -> None:
    import_torchvision()
    from timm.utils.agc import adaptive_clip_grad

    ours, reference = model(scale, torch.float64), model(scale, torch.float64)
    before = NoClip()(list(ours.parameters()))
    assert torch.equal(AdaptiveClip(factor)(list(ours.parameters())), before)
    adaptive_clip_grad(list(reference.parameters()), factor)
    assert_same_gradients(ours, reference, tolerance=1e-15)


def test_adaptive_clipping_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]]))
    weight.grad = torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.006, 0.008]])
    AdaptiveClip(factor=0.1, eps=0.5)([weight])
    # Rows may be as long as 0.1·5, 0.1·0.5 and 0.1·5; they are 1, 1 and 0.01 long.
    torch.testing.assert_close(weight.grad, torch.tensor([[0.3, 0.4], [0.03, 0.04], [0.006, 0.008]]))


def test_adaptive_clipping_leaves_out_what_is_skipped() -> None:
    net, untouched = model(1e3), model(1e3)
    AdaptiveClip(skip=[net.get_parameter("3.weight"), net.get_parameter("3.bias")])(list(net.parameters()))
    changed = []
    for name, parameter in net.named_parameters():
        before = untouched.get_parameter(name).grad
        if parameter.grad is not None and before is not None and not torch.equal(parameter.grad, before):
            changed.append(name)
    assert changed == ["0.weight", "1.weight", "1.bias"]  # the bias before a BatchNorm has no gradient


def assert_same_gradients(ours: nn.Module, reference: nn.Module, tolerance: float = 0.0) -> None:
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=tolerance, atol=tolerance)


def test_the_norm_is_the_root_of_all_squares_together() -> None:
    net = model(dtype=torch.float64)
    squares = [x * x for p in net.parameters() if p.grad is not None for x in p.grad.flatten().tolist()]
    assert NoClip()(list(net.parameters())).item() == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-12)


def test_measuring_changes_nothing() -> None:
    net = model()
    before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    NoClip()(list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), before, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(gradient, parameter.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("measure", EVERY)
def test_without_gradients_the_norm_is_zero(measure: Clip) -> None:
    assert measure(list(nn.Linear(2, 2).parameters())).item() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("measure", EVERY)
def test_what_is_not_finite_shows_in_the_norm(measure: Clip, value: float) -> None:
    net = model()
    gradient = next(net.parameters()).grad
    assert gradient is not None
    gradient.view(-1)[7] = value
    assert not math.isfinite(measure(list(net.parameters())).item())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("clip", EVERY)
def test_what_is_not_finite_can_still_be_seen_where_it_was(clip: Clip, value: float) -> None:
    net, untouched = model(1e3), model(1e3)
    for each in (net, untouched):
        gradient = each.get_parameter("1.weight").grad
        assert gradient is not None
        gradient[2] = value
    clip(list(net.parameters()))
    for one, other in zip(net.parameters(), untouched.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert other.grad is None or torch.equal(one.grad.nan_to_num(), other.grad.nan_to_num())  # type: ignore[union-attr]


@pytest.mark.parametrize("clip", EVERY)
def test_no_value_is_read_on_the_host(clip: Clip) -> None:
    """On fake tensors a read raises; so would it stop a GPU from running ahead."""
    with FakeTensorMode():
        net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(4, 5))
        for parameter in net.parameters():
            parameter.grad = torch.empty_like(parameter)
        assert clip(list(net.parameters())).ndim == 0


@pytest.mark.parametrize("clip", [ClipGradNorm(0.5), ClipGradValue(0.01)])
def test_sharded_gradients_are_clipped_alike(clip: Clip) -> None:
    plain, sharded = model(), model()
    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        devices = init_device_mesh("cpu", (1,))
        for module in list(sharded.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                shard = nn.Parameter(distribute_tensor(parameter.detach(), devices, [Shard(0)]))
                shard.grad = None if parameter.grad is None else distribute_tensor(parameter.grad, devices, [Shard(0)])
                setattr(module, name, shard)
        clip(list(sharded.parameters()))
    finally:
        destroy_process_group()
    clip(list(plain.parameters()))
    for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and isinstance(other.grad, DTensor):
            assert torch.equal(one.grad, other.grad.to_local())
