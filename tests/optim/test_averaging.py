"""Averages of weights, held against closed formulas in float64."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.checkpoint.state import flatten, unflatten
from paceline.core.errors import CheckpointError
from paceline.optim.averaging import Averaging, WeightAverage, update_bn
from paceline.optim.averaging import ema as make_ema
from paceline.optim.averaging import swa as make_swa


class Weights(nn.Module):
    """Two weights and a buffer that a test sets."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(2, 2, dtype=dtype))
        self.register_buffer("seen", torch.zeros(2))

    @torch.no_grad()
    def become(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
        assert isinstance(self.seen, Tensor)
        self.seen.fill_(step)


def run(averaging: Averaging, model: Weights, steps: range) -> list[Tensor]:
    history = []
    for step in steps:
        model.become(step)
        averaging.update(model)
        history.append(model.first.detach().clone())
    return history


def average(averaging: Averaging, model: Weights) -> Tensor:
    with averaging.swap_in(model):
        return model.first.detach().clone()


def is_close(one: Tensor, other: Tensor) -> bool:
    is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return is_alike and torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(decay=st.floats(0, 0.9999), steps=st.integers(1, 40), every=st.integers(1, 4), start=st.integers(0, 10))
def test_ema_is_the_weighted_sum_of_all_weights(decay: float, steps: int, every: int, start: int) -> None:
    model, ema = Weights(), make_ema(decay, warmup=False, every_steps=every, start_step=start)
    history = run(ema, model, range(steps))
    taken = [history[step - 1] for step in range(1, steps + 1) if step > start and (step - start) % every == 0]
    assert ema.is_ready == bool(taken)
    if not taken:
        assert torch.equal(average(ema, model), model.first)
        return
    last = len(taken) - 1
    shares = [decay**last] + [(1 - decay) * decay ** (last - index) for index in range(1, len(taken))]
    assert is_close(average(ema, model), sum((a * b for a, b in zip(shares, taken, strict=True)), torch.zeros(3)))


def test_ema_warms_up() -> None:
    model, ema = Weights(), make_ema(0.5)
    history = run(ema, model, range(12))
    expected = history[0]
    for count, weights in enumerate(history[1:], start=1):
        keep = min(0.5, (1 + count) / (10 + count))  # 2/11, 3/12 … 1/2 from count 8 on
        expected = keep * expected + (1 - keep) * weights
    assert is_close(average(ema, model), expected)


@pytest.mark.parametrize(("start", "first"), [(0.5, 20), (0.0, 0), (30, 30)])
def test_swa_is_the_mean_from_its_start_on(start: float, first: int) -> None:
    model, swa = Weights(), make_swa(total_steps=40, steps_per_epoch=5, start=start)
    history = run(swa, model, range(40))
    taken = [history[step - 1] for step in range(first + 5, 41, 5)]
    assert is_close(average(swa, model), torch.stack(taken).mean(0))


def test_swa_may_take_weights_more_often_than_once_an_epoch() -> None:
    model, swa = Weights(), make_swa(total_steps=20, steps_per_epoch=10, start=0.5, every_steps=2)
    history = run(swa, model, range(20))
    assert is_close(average(swa, model), torch.stack(history[11::2]).mean(0))


@pytest.mark.parametrize(("start", "every"), [(40, None), (1000, 1), (0.95, None)])
def test_swa_that_never_begins_is_refused(start: float, every: int | None) -> None:
    with pytest.raises(ValueError, match="40"):
        make_swa(total_steps=40, steps_per_epoch=5, start=start, every_steps=every)


def test_own_weights_and_buffers_come_back() -> None:
    model, ema = Weights(), make_ema(0.9)
    run(ema, model, range(5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with ema.swap_in(model):
        assert not torch.equal(model.first, before["first"])
        assert torch.equal(model.get_buffer("seen"), before["seen"])
        model.get_buffer("seen").fill_(-1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_own_weights_come_back_after_a_failure() -> None:
    model, ema = Weights(), make_ema(0.9)
    run(ema, model, range(5))
    before = model.first.detach().clone()
    with pytest.raises(RuntimeError, match="evaluation failed"), ema.swap_in(model):
        raise RuntimeError("evaluation failed")
    assert torch.equal(model.first, before)


def test_applying_changes_no_average() -> None:
    model, disturbed = Weights(), make_ema(0.9)
    plain = make_ema(0.9)
    for step in range(6):
        model.become(step)
        plain.update(model)
        disturbed.update(model)
        average(disturbed, model)
    assert torch.equal(average(plain, model), average(disturbed, model))


@pytest.mark.parametrize("make", [lambda: make_ema(0.9, every_steps=2), lambda: make_swa(20, 2, 0.25)])
@pytest.mark.parametrize("stop", [0, 3, 9])
def test_resumes_to_the_bit(make: type[WeightAverage], stop: int) -> None:
    model, whole, half, fresh = Weights(torch.float32), make(), make(), make()  # type: ignore[call-arg]
    run(whole, model, range(20))
    run(half, model, range(stop))
    tensors, skeleton = flatten(half.state_dict())
    saved = unflatten(tensors, json.loads(json.dumps(skeleton)))
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    fresh.load_state_dict(saved)
    assert fresh.is_ready == half.is_ready
    assert torch.equal(average(fresh, model), average(half, model))
    run(fresh, model, range(stop, 20))
    one, other = whole.state_dict(), fresh.state_dict()
    assert (one["steps"], one["count"]) == (other["steps"], other["count"])
    assert all(torch.equal(tensor, other["average"][name]) for name, tensor in one["average"].items())
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in kept.items())


def test_a_saved_average_of_another_model_is_refused() -> None:
    model, ema = Weights(), make_ema(0.9)
    run(ema, model, range(2))
    other = make_ema(0.9)
    other.load_state_dict(ema.state_dict())
    with pytest.raises(CheckpointError, match="bias, first, second, weight"):
        other.update(nn.Linear(2, 2))


def test_frozen_parameters_may_begin_to_learn() -> None:
    model, ema = Weights(), make_ema(0.9, warmup=False)
    model.first.requires_grad_(False)
    with torch.no_grad():
        model.first.fill_(1.0)
    for _ in range(3):
        ema.update(model)
    assert torch.equal(average(ema, model), torch.ones(3, dtype=torch.float64))
    model.first.requires_grad_(True)
    with torch.no_grad():
        model.first.fill_(2.0)
    ema.update(model)
    assert is_close(average(ema, model), torch.full((3,), 1.1, dtype=torch.float64))


def test_half_precision_weights_are_averaged_in_float32() -> None:
    model, ema = Weights(torch.bfloat16), make_ema(0.999, warmup=False)
    with torch.no_grad():
        model.first.fill_(1.0)
    ema.update(model)
    with torch.no_grad():
        model.first.fill_(2.0)
    for _ in range(200):
        ema.update(model)
    kept = ema.state_dict()["average"]["first"]
    assert kept.dtype == torch.float32
    torch.testing.assert_close(kept, torch.full((3,), 2 - 0.999**200), rtol=1e-5, atol=0)
    assert average(ema, model).dtype == torch.bfloat16


def test_no_averaging_has_the_same_methods_and_changes_nothing() -> None:
    model, nothing = Weights(), Averaging()
    run(nothing, model, range(3))
    assert torch.equal(average(nothing, model), model.first)
    nothing.load_state_dict(nothing.state_dict())
    assert not nothing.is_ready


class Normed(nn.Module):
    """Two layers, each with a BatchNorm, and dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm_one = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.two, self.norm_two = nn.Linear(4, 2), nn.BatchNorm1d(2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        normed: Tensor = self.norm_two(self.two(self.dropout(self.norm_one(self.one(inputs)))))
        return normed


def mean_of(norm: nn.BatchNorm1d) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def variance_of(norm: nn.BatchNorm1d) -> Tensor:
    assert norm.running_var is not None
    return norm.running_var


class TestUpdateBn:
    def network(self) -> Normed:
        torch.manual_seed(0)
        return Normed()

    def test_statistics_are_those_of_the_inputs(self) -> None:
        model = self.network()
        batches = torch.randn(5, 8, 3)
        mean_of(model.norm_one).fill_(100)
        update_bn(model, batches)
        values = model.one(batches)
        torch.testing.assert_close(mean_of(model.norm_one), values.mean((0, 1)))
        torch.testing.assert_close(variance_of(model.norm_one), values.var(1).mean(0))
        normed = (values - values.mean(1, keepdim=True)) / (values.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
        torch.testing.assert_close(mean_of(model.norm_two), model.two(normed).mean((0, 1)), rtol=1e-4, atol=1e-5)

    def test_modes_and_momenta_come_back(self) -> None:
        model = self.network().train()
        model.norm_two.eval()
        modes = [module.training for module in model.modules()]
        update_bn(model, torch.randn(2, 8, 3))
        assert [module.training for module in model.modules()] == modes
        assert [model.norm_one.momentum, model.norm_two.momentum] == [0.1, 0.1]

    def test_frozen_layers_keep_their_statistics(self) -> None:
        model = self.network()
        model.norm_one.requires_grad_(False)
        update_bn(model, torch.randn(2, 8, 3))
        assert torch.equal(mean_of(model.norm_one), torch.zeros(4))
        assert not torch.equal(mean_of(model.norm_two), torch.zeros(2))

    def test_inputs_of_any_form_with_a_way_to_run_them(self) -> None:
        one, other = self.network(), self.network()
        batches = torch.randn(3, 8, 3)
        update_bn(one, [{"image": batch} for batch in batches], lambda batch: one(batch["image"]))
        update_bn(other, batches)
        assert torch.equal(variance_of(one.norm_two), variance_of(other.norm_two))

    def test_statistics_of_averaged_weights_go_with_them(self) -> None:
        model, swa = self.network(), make_swa(total_steps=2, steps_per_epoch=1, start=0.0)
        swa.update(model)
        before = mean_of(model.norm_one).clone()
        with swa.swap_in(model):
            update_bn(model, torch.randn(2, 8, 3))
            assert not torch.equal(mean_of(model.norm_one), before)
        assert torch.equal(mean_of(model.norm_one), before)
