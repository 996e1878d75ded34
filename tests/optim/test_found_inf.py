"""A step at which `found_inf` is 1 leaves no trace in any optimizer: as if it had never been called."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.registry import register
from paceline.optim.found_inf import skip_on_inf
from paceline.optim.optimizers import make_optimizer

NAMES = [
    *("sgd", "adam", "adamw", "adagrad", "adamax", "nadam", "radam", "rmsprop", "adadelta", "adafactor", "asgd"),
    *("rprop", "lion", "lamb", "lars", "muon", "timm/adabelief", "timm/adamp", "timm/nadamw", "timm/sgdw"),
]
FUSED = {"sgd", "adam", "adamw", "adagrad"}
STEPS = "..x.xx.."
"""A dot is a step, an x one that is skipped."""


def solver(name: str) -> tuple[Optimizer, list[nn.Parameter]]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))]
    decay = 0.0 if name == "rprop" else 0.01
    entry = register.kind("optimizer").find(name)
    assert entry is not None
    arguments = dict(entry.arguments.model_validate({}))
    return make_optimizer(entry.resolve(), weights, 0.01, decay, arguments), weights


def give_gradients(weights: list[nn.Parameter], step: int, spoiled: bool) -> None:
    torch.manual_seed(step)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
        if spoiled:
            weight.grad[0] = math.nan


def trained(name: str, skipped: str, found_inf: Tensor | None) -> list[Tensor]:
    optimizer, weights = solver(name)
    if found_inf is not None:
        skip_on_inf(optimizer, found_inf)
    for step, kind in enumerate(skipped):
        if kind == "x" and found_inf is None:
            continue
        give_gradients(weights, step, kind == "x")
        if found_inf is not None:
            found_inf.fill_(kind == "x")
        optimizer.step()
    state = [value for each in weights for value in optimizer.state[each].values() if isinstance(value, Tensor)]
    return [*weights, *state]


@pytest.mark.parametrize("skipped", [STEPS, "x" + STEPS])
@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_step_leaves_no_trace(name: str, skipped: str) -> None:
    expected, found = trained(name, skipped, None), trained(name, skipped, torch.zeros(()))
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(each.isfinite().all() for each in found)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts how often the host reads a value."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*sorted(FUSED), "lars", "lion"])
def test_the_host_reads_nothing_once_there_is_state(name: str) -> None:
    optimizer, weights = solver(name)
    skip_on_inf(optimizer, torch.zeros(()))
    give_gradients(weights, 0, False)
    optimizer.step()
    give_gradients(weights, 1, False)
    with Reads() as reads:  # type: ignore[no-untyped-call]
        optimizer.step()
    assert reads.count == 0
