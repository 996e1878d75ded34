"""`step_optimizer` does what `optimizer.step()` does, with hooks, and with its range where somebody profiles."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from paceline.optim.optimizer_step import step_optimizer


def make(kind: type[Optimizer], **options: Any) -> tuple[nn.Parameter, Optimizer]:
    weight = nn.Parameter(torch.arange(6.0))
    weight.grad = torch.linspace(-1, 1, 6)
    return weight, kind([weight], **options)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_the_weights_are_those_of_torchs_own_step(kind: type[Optimizer]) -> None:
    ours, theirs = make(kind, lr=0.1), make(kind, lr=0.1)
    for _ in range(3):
        step_optimizer(ours[1])
        theirs[1].step()
    assert torch.equal(ours[0], theirs[0])
    assert torch.is_grad_enabled()


def test_hooks_of_the_optimizer_and_of_all_optimizers_are_called_in_order() -> None:
    called: list[str] = []
    _, optimizer = make(torch.optim.SGD, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: called.append("own before"))
    optimizer.register_step_post_hook(lambda *_: called.append("own after"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("all before")),
        register_optimizer_step_post_hook(lambda *_: called.append("all after")),
    ]
    step_optimizer(optimizer)
    for handle in handles:
        handle.remove()
    assert called == ["all before", "own before", "own after", "all after"]


def test_a_hook_may_replace_the_arguments() -> None:
    class Doubled(torch.optim.SGD):
        def step(self, closure: Any = None, factor: float = 1.0) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"] * factor)

    weight, optimizer = make(Doubled, lr=0.5)
    expected: Tensor = weight.detach() - weight.grad  # type: ignore[operator]
    optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "factor": 2.0}))
    step_optimizer(optimizer)
    assert torch.equal(weight, expected)


def test_a_step_set_on_the_optimizer_is_called_with_its_hooks() -> None:
    called: list[str] = []
    weight, optimizer = make(torch.optim.SGD, lr=0.5)
    expected: Tensor = weight.detach() - 0.5 * weight.grad  # type: ignore[operator]
    torch_step = optimizer.step

    def own_step() -> None:
        called.append("own step")
        torch_step()

    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.step = own_step  # type: ignore[method-assign, assignment]
    step_optimizer(optimizer)
    assert called == ["own step", "before"]
    assert torch.equal(weight, expected)


def test_torchs_scheduler_notices_the_step() -> None:
    _, optimizer = make(torch.optim.AdamW, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step_optimizer(optimizer)
    with warnings.catch_warnings(action="error"):  # torch warns if `step` of the scheduler comes first
        scheduler.step()


def test_a_profile_shows_the_step() -> None:
    _, optimizer = make(torch.optim.AdamW, lr=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step_optimizer(optimizer)
    assert "Optimizer.step#AdamW.step" in {event.key for event in profiled.key_averages()}
