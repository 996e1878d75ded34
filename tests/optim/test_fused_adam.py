"""Adam and AdamW on a CPU are torch's fused ones, to the bit, in what they update and in what they keep."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.optim import fused_adam
from paceline.optim.optimizer_step import step_optimizer
from paceline.optim.optimizers import construct

PAIRS = [(fused_adam.Adam, torch.optim.Adam), (fused_adam.AdamW, torch.optim.AdamW)]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True, "weight_decay": 0.1},
    {"maximize": True, "betas": (0.5, 0.9), "eps": 1e-4},
]


def weights() -> list[nn.Parameter]:
    """Two of each type, long enough for vector instructions."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(70 + n, generator=generator).to(dtype)) for n in range(2) for dtype in DTYPES]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:4], "lr": 0.1}, {"params": parameters[4:], "lr": 0.03, "weight_decay": 0.0}]


def learn(optimizer: Optimizer, steps: range, step: Callable[[Optimizer], Any] = step_optimizer) -> None:
    """The last parameter gets its first gradient in step 2, and the first one none in step 1."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for place, each in enumerate(parameters):
            is_left_out = (place == len(parameters) - 1 and number < 2) or (place == 0 and number == 1)
            gradient = torch.randn(each.shape, generator=generator).to(each.dtype)
            each.grad = None if is_left_out else gradient
        step(optimizer)


def contents(optimizer: Optimizer) -> list[Any]:
    """Weights, then the state of each by name."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return [*parameters, *(optimizer.state[each] for each in parameters)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return list(one) == list(other) and all(same(one[key], other[key]) for key in one)


def assert_same(ours: Optimizer, theirs: Optimizer) -> None:
    assert all(map(same, contents(ours), contents(theirs)))
    assert contents(ours)[-1], "every parameter has state"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("own", "torchs"), PAIRS)
def test_the_same_bits(own: type[torch.optim.Adam], torchs: type[torch.optim.Adam], options: dict[str, Any]) -> None:
    ours, theirs = (kind(groups(weights()), fused=True, **options) for kind in (own, torchs))
    learn(ours, range(5))
    learn(theirs, range(5), lambda optimizer: optimizer.step())
    assert_same(ours, theirs)


@pytest.mark.parametrize(("own", "torchs"), PAIRS)
def test_found_inf_and_grad_scale_of_whoever_sets_them(
    own: type[torch.optim.Adam], torchs: type[torch.optim.Adam]
) -> None:
    pair = [kind(groups(weights()), fused=True, amsgrad=True) for kind in (own, torchs)]
    for optimizer in pair:
        optimizer.found_inf = found_inf = torch.zeros(())  # type: ignore[attr-defined]
        for number, is_skipped in enumerate([True, False, False, True, False]):
            found_inf.fill_(is_skipped)
            learn(optimizer, range(number, number + 1))
        optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
        learn(optimizer, range(5, 6))
    assert_same(*pair)


def test_step_counts_that_are_views_of_other_tensors_are_counted_once() -> None:
    """A tensor of no dimensions, one that is longer, and two places of the same one."""
    for counts in (
        [torch.tensor(3.0)[...]] * 2,
        list(torch.tensor([3.0, 3.0, 7.0])[:2]),
        [torch.full((2,), 3.0)[0]] * 2,
    ):
        parameters = [nn.Parameter(torch.ones(2)) for _ in counts]
        optimizer = fused_adam.Adam(parameters, lr=0.1, fused=True)
        bases = [None if count._base is None else count._base.clone() for count in counts]
        for parameter, count in zip(parameters, counts, strict=True):
            state = {"step": count, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
            optimizer.state[parameter] = state
            parameter.grad = torch.ones(2)
        optimizer.step()
        assert [optimizer.state[parameter]["step"].item() for parameter in parameters] == [4.0, 4.0]
        for count, base in zip(counts, bases, strict=True):
            assert base is None or torch.equal(count._base, base)


@pytest.mark.parametrize(("own", "torchs"), PAIRS)
def test_state_moves_to_torchs_and_back(own: type[torch.optim.Adam], torchs: type[torch.optim.Adam]) -> None:
    whole = own(groups(weights()), fused=True)
    learn(whole, range(6))
    parameters = weights()
    last = own(groups(parameters), fused=True)
    for number, kind in enumerate((torchs, own, torchs)):
        state, last = last.state_dict(), kind(groups(parameters), fused=True)
        last.load_state_dict(pickle.loads(pickle.dumps(state)))
        learn(last, range(2 * number, 2 * number + 2))
    assert_same(last, whole)


def test_a_state_without_newer_keys_is_loaded() -> None:
    first, second = (fused_adam.AdamW(groups(weights()), fused=True) for _ in range(2))
    learn(first, range(3))
    state = deepcopy(first.state_dict())
    for group in state["param_groups"]:
        for key in ("decoupled_weight_decay", "maximize", "capturable", "differentiable"):
            del group[key]
    for each, value in zip(contents(second)[: len(weights())], contents(first), strict=False):
        each.data.copy_(value)
    second.load_state_dict(state)
    for optimizer in (first, second):
        learn(optimizer, range(3, 5))
    assert_same(second, first)


def test_copies_learn_on_their_own() -> None:
    optimizer = fused_adam.AdamW(groups(weights()), fused=True)
    learn(optimizer, range(3))
    for copy in (deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        learn(copy, range(3, 4))
        expected = torch.optim.AdamW(groups(weights()), fused=True)
        learn(expected, range(4))
        assert_same(copy, expected)


def test_parameters_of_a_later_group_join() -> None:
    pair = []
    for kind in (fused_adam.Adam, torch.optim.Adam):
        parameters = weights()
        optimizer = kind(groups(parameters[:5]), fused=True)
        learn(optimizer, range(2))
        optimizer.add_param_group({"params": parameters[5:], "lr": 0.2})
        learn(optimizer, range(2, 5))
        pair.append(optimizer)
    assert_same(*pair)


@pytest.mark.parametrize("step", [step_optimizer, lambda optimizer: optimizer.step()])
@pytest.mark.parametrize("kind", [fused_adam.AdamW, fused_adam.Adam])
def test_hooks_are_called_once(kind: type[torch.optim.Adam], step: Callable[[Optimizer], Any]) -> None:
    called = []
    optimizer = kind(weights(), fused=True)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    learn(optimizer, range(1), step)
    assert called == ["before", "after"]


def test_a_closure_has_gradients() -> None:
    (weight,) = parameters = [nn.Parameter(torch.ones(3))]
    optimizer = fused_adam.Adam(parameters, lr=0.1, fused=True)

    def closure() -> Tensor:
        loss: Tensor = weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) == 3
    assert (weight < 1).all()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("torchs", [torch.optim.Adam, torch.optim.AdamW])
def test_checkpoints_and_messages_know_it_by_torchs_name(torchs: type[Optimizer]) -> None:
    made = construct(torchs, [{"params": weights()}])
    assert type(made).__module__ == fused_adam.__name__
    assert type(made).__name__ == torchs.__name__


def test_an_optimizer_of_a_users_own_stays_what_it_is() -> None:
    class Own(torch.optim.Adam):
        """Derived from torch's."""

    assert type(construct(Own, [{"params": weights()}])) is Own
