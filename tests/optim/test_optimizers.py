"""Optimizers as recipes name them: what they get, what they keep, and going on from where they were."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.state import flatten, load_optimizer, optimizer_tree, unflatten
from paceline.core.registry import register
from paceline.optim.optimizers import make_optimizer
from paceline.optim.timm_optimizers import timm_optimizer

optimizers = register.kind("optimizer")
ALL = optimizers.names()
FUSED = ["sgd", "adam", "adamw", "adagrad"]
COMMON = ["sgd", "adam", "adamw", "rmsprop", "adadelta", "adagrad", "timm/lamb", "timm/lars", "muon"]


def distinct() -> list[str]:
    """One name for each set of arguments: names of timm that differ in a default are the same optimizer."""
    found = {}
    for name in ALL:
        entry = optimizers.find(name)
        assert entry is not None
        found[name.partition("/")[0], *entry.arguments.model_fields] = name
    return list(found.values())


def network(channels_last: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 8), nn.Linear(8, 4)
    )
    return net.to(memory_format=torch.channels_last) if channels_last else net  # type: ignore[call-overload]


def groups_of(model: nn.Module, lr: float = 0.02) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    settings = [(named[:3], 0.5, 0.1, "first"), (named[3:], 1.0, 0.0, "rest")]
    return [
        {
            "params": [parameter for _, parameter in part],
            "param_names": [name for name, _ in part],
            "lr": lr * lr_scale,
            "weight_decay": weight_decay,
            "lr_scale": lr_scale,
            "label": label,
        }
        for part, lr_scale, weight_decay, label in settings
    ]


def named_optimizer(name: str, parameters: Any, lr: float = 0.02, decay: float = 0.0, **arguments: Any) -> Optimizer:
    entry = optimizers.find(name)
    assert entry is not None
    checked = dict(entry.arguments.model_validate_json(json.dumps(arguments)))
    given = list(parameters)
    groups = given if isinstance(given[0], dict) else [{"params": [each for each in given if each.requires_grad]}]
    return make_optimizer(entry.resolve(), groups, lr, decay, checked)


def grouped(name: str, model: nn.Module, **arguments: Any) -> Optimizer:
    groups = groups_of(model)
    if name == "rprop":
        groups = [{**group, "weight_decay": 0.0} for group in groups]
    return named_optimizer(name, groups, **arguments)


def learn(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        images = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(step))
        model(images).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * group["lr_scale"] / (1 + step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def parameter(values: list[float], gradient: list[float], dtype: torch.dtype = torch.float64) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values, dtype=dtype))
    made.grad = torch.tensor(gradient, dtype=dtype)
    return made


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ALL)
def test_groups_keep_their_settings(name: str) -> None:
    model = network()
    before = copy.deepcopy(model)
    optimizer = grouped(name, model)
    learn(model, optimizer, range(2))
    for group, given in zip(optimizer.param_groups, groups_of(model), strict=True):
        assert group["label"] == given["label"]
        assert group["lr_scale"] == given["lr_scale"]
        assert group["lr"] == given["lr"] / 2
        assert len(group["params"]) == len(given["params"])
    unchanged = [key for key, value in model.named_parameters() if torch.equal(value, before.get_parameter(key))]
    assert unchanged == []


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", distinct())
def test_continues_to_the_bit(name: str, channels_last: bool) -> None:
    whole = network(channels_last)
    learn(whole, grouped(name, whole), range(4))

    first = network(channels_last)
    optimizer = grouped(name, first)
    learn(first, optimizer, range(2))
    tensors, skeleton = flatten(optimizer_tree(optimizer, first))
    files = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    saved = unflatten(files, json.loads(json.dumps(skeleton)))

    second = network(channels_last)
    second.load_state_dict(first.state_dict())
    fresh = grouped(name, second)
    load_optimizer(fresh, second, saved)
    learn(second, fresh, range(2, 4))
    assert same(whole, second)


@pytest.mark.parametrize("name", ["rmsprop", "sgd"])
def test_momentum_continues_to_the_bit(name: str) -> None:
    whole, first = network(), network()
    learn(whole, grouped(name, whole, momentum=0.9), range(6))
    optimizer = grouped(name, first, momentum=0.9)
    learn(first, optimizer, range(3))
    second = copy.deepcopy(first)
    fresh = grouped(name, second, momentum=0.9)
    load_optimizer(fresh, second, optimizer_tree(optimizer, first))
    assert "momentum_buffer" in fresh.state[next(second.parameters())]
    learn(second, fresh, range(3, 6))
    assert same(whole, second)


@pytest.mark.parametrize("name", COMMON)
def test_parameters_may_begin_to_learn_later(name: str) -> None:
    model = network()
    frozen = list(model[0].parameters())
    optimizer = grouped(name, model)
    for each in frozen:
        each.requires_grad_(False)
    before = [each.clone() for each in frozen]
    learn(model, optimizer, range(2))
    assert all(torch.equal(a, b) for a, b in zip(frozen, before, strict=True))
    if name != "adagrad":  # which makes its state at once
        assert not any(each in optimizer.state for each in frozen)
    for each in frozen:
        each.requires_grad_(True)
    learn(model, optimizer, range(2, 4))
    assert not any(torch.equal(a, b) for a, b in zip(frozen, before, strict=True))


@pytest.mark.parametrize("name", FUSED)
def test_fused_where_it_runs_and_equal_to_the_plain_form(name: str) -> None:
    fast, plain = network().double(), network().double()
    optimizer = named_optimizer(name, groups_of(fast))
    assert optimizer.param_groups[0]["fused"] is True
    options = {**defaults_of(name), "foreach": False}
    reference = getattr(torch.optim, type(optimizer).__name__)(groups_of(plain), **options)
    for model, each in ((fast, optimizer), (plain, reference)):
        for index, weight in enumerate(model.parameters()):
            weight.grad = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
        for _ in range(3):
            each.step()
    for a, b in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_weights_of_half_precision_move_as_far_as_those_of_double(name: str, dtype: torch.dtype) -> None:
    """Long enough for vector instructions; the fused SGD of torch 2.13 leaves such weights as they are."""
    generator = torch.Generator().manual_seed(2)
    start, gradients = torch.rand(70, generator=generator), torch.rand(4, 70, generator=generator) + 0.5
    moved = []
    for precision in (dtype, torch.float64):
        weight = nn.Parameter(start.to(dtype).to(precision))
        optimizer = named_optimizer(name, [weight], lr=0.1)
        for gradient in gradients:
            weight.grad = gradient.to(dtype).to(precision)
            optimizer.step()
        moved.append(weight.detach().double() - start.to(dtype).double())
    assert moved[1].abs().min() > 0.1
    torch.testing.assert_close(moved[0], moved[1], rtol=0.05, atol=0.02)


def defaults_of(name: str) -> dict[str, Any]:
    entry = optimizers.find(name)
    assert entry is not None
    return dict(entry.arguments())


@pytest.mark.parametrize(("nesterov", "dampening"), [(False, 0.0), (True, 0.0), (False, 0.5)])
def test_sgd_with_late_gradients_is_that_of_the_plain_form(nesterov: bool, dampening: float) -> None:
    arguments = {"momentum": 0.9, "nesterov": nesterov, "dampening": dampening}
    weights = [parameter([1.0, 2.0], [0.5, -1.0]), parameter([3.0], [2.0])]
    plain = copy.deepcopy(weights)
    ours = named_optimizer("sgd", weights, lr=0.1, decay=0.1, **arguments)
    reference = torch.optim.SGD(plain, lr=0.1, weight_decay=0.1, foreach=False, **arguments)  # type: ignore[arg-type]
    for step in range(4):
        for early, late in (weights, plain):
            early.grad = torch.tensor([0.5, -1.0], dtype=torch.float64) * step
            late.grad = torch.tensor([2.0 - step], dtype=torch.float64) if step else None
        ours.step()
        reference.step()
    for one, other in zip(weights, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


def test_what_the_table_does_not_know_gets_the_defaults_of_timm() -> None:
    settings = timm_optimizer("larc", [{"params": [parameter([1.0], [1.0])]}], lr=0.1).param_groups[0]
    assert (settings["trust_clip"], settings["momentum"]) == (True, 0.9)


def test_timm_names_of_torch_optimizers_are_fused_too() -> None:
    assert named_optimizer("timm/adamw", groups_of(network())).param_groups[0]["fused"] is True


@pytest.mark.parametrize("name", ["rmsprop", "adadelta", "rprop"])
def test_not_fused_where_torch_has_no_such_form(name: str) -> None:
    assert "fused" not in grouped(name, network()).param_groups[0]


def test_adam_adds_decay_to_the_gradient_of_its_group() -> None:
    decayed, plain = parameter([1.0, -2.0], [0.1, 0.3]), parameter([1.0, -2.0], [0.1, 0.3])
    groups = [
        {"params": [decayed], "lr": 0.1, "weight_decay": 0.5},
        {"params": [plain], "lr": 0.2, "weight_decay": 0.0},
    ]
    named_optimizer("adam", groups, decay=0.5).step()
    # The first step is lr times the sign of the gradient: 0.1 + 0.5·1 > 0, 0.3 - 0.5·2 < 0.
    torch.testing.assert_close(decayed.data, torch.tensor([0.9, -1.9], dtype=torch.float64))
    torch.testing.assert_close(plain.data, torch.tensor([0.8, -2.2], dtype=torch.float64))


def test_rmsprop_keeps_groups_decay_and_momentum() -> None:
    decayed, plain = parameter([2.0], [0.0]), parameter([2.0], [0.3])
    groups = [
        {"params": [decayed], "lr": 0.1, "weight_decay": 0.5},
        {"params": [plain], "lr": 0.2, "weight_decay": 0.0},
    ]
    optimizer = named_optimizer("rmsprop", groups, momentum=0.9, alpha=0.75, eps=1e-12)
    optimizer.step()
    # Squares: 0.25·g²; the step is lr·g / (0.5·|g|) = 2·lr, for a gradient of 0 + 0.5·2 and of 0.3.
    torch.testing.assert_close(decayed.data, torch.tensor([1.8], dtype=torch.float64))
    torch.testing.assert_close(plain.data, torch.tensor([1.6], dtype=torch.float64))
    optimizer.step()
    # Squares: 0.4375·g²; the momentum is 0.9·2 + 1/√0.4375.
    step = 0.2 * (0.9 * 2 + 0.4375**-0.5)
    torch.testing.assert_close(plain.data, torch.tensor([1.6 - step], dtype=torch.float64))


def test_adamw_decays_beside_the_gradient() -> None:
    weight = parameter([1.0], [0.5])
    named_optimizer("adamw", [weight], lr=0.1, decay=0.5).step()
    torch.testing.assert_close(weight.data, torch.tensor([1 - 0.05 - 0.1], dtype=torch.float64))


def test_lists_of_a_recipe_become_tuples() -> None:
    assert named_optimizer("adamw", [parameter([1.0], [1.0])], betas=[0.8, 0.9]).param_groups[0]["betas"] == (0.8, 0.9)


def test_plain_parameters_that_do_not_learn_are_left_out() -> None:
    model = network()
    model[0].requires_grad_(False)
    assert len(named_optimizer("sgd", model.parameters()).param_groups[0]["params"]) == 6
    with pytest.raises(ValueError, match="nothing to train"):
        named_optimizer("sgd", model[0].parameters())


def test_given_groups_are_not_changed() -> None:
    groups = groups_of(network())
    kept = [dict(group) for group in groups]
    named_optimizer("adamw", groups)
    assert all(a.keys() == b.keys() for a, b in zip(groups, kept, strict=True))


def test_decay_is_refused_by_what_has_none() -> None:
    with pytest.raises(ValueError, match=r"rprop has no weight decay.*got 0\.1"):
        named_optimizer("rprop", groups_of(network()))
    with pytest.raises(ValueError, match=r"got 0\.5"):
        named_optimizer("rprop", [parameter([1.0], [1.0])], decay=0.5)


def test_an_optimizer_of_ones_own() -> None:
    class Sign(Optimizer):
        def __init__(self, params: Any, lr: float = 1.0, weight_decay: float = 0.0, power: int = 1) -> None:
            super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "power": power})

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for each in group["params"]:
                    each.sub_(each.grad.sign() ** group["power"], alpha=group["lr"])

    weight = parameter([1.0], [-3.0])
    arguments = {"lr": 1.0, "weight_decay": 0.0, "power": 2}  # as read off its signature
    make_optimizer(Sign, [{"params": [weight]}], 0.5, 0.0, arguments).step()
    assert weight.item() == 0.5


class TestMuon:
    def weights(self) -> dict[str, nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        shapes = {"body.weight": (16, 12), "filters": (8, 4, 3, 3), "head.weight": (6, 16), "bias": (16,)}
        made = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
        for weight in made.values():
            weight.grad = torch.randn(weight.shape, generator=generator)
        return made

    def optimizer(self, weights: dict[str, nn.Parameter], **arguments: Any) -> Optimizer:
        group = {"params": list(weights.values()), "param_names": list(weights), "lr": 0.1, "weight_decay": 0.0}
        return named_optimizer("muon", [{**group, "label": "all", "lr_scale": 1.0}], lr=0.1, **arguments)

    def steps(self, **arguments: Any) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
        weights = self.weights()
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        self.optimizer(weights, **arguments).step()
        return {name: before[name] - weight.detach() for name, weight in weights.items()}, self.weights()

    def adamw_step(self, weight: nn.Parameter) -> Tensor:
        before = weight.detach().clone()
        torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.0).step()
        return before - weight.detach()

    def test_matrices_and_filters_move_orthogonally(self) -> None:
        steps, _ = self.steps()
        for name in ("body.weight", "filters", "head.weight"):
            matrix = steps[name].flatten(1)
            sizes = torch.linalg.svdvals(matrix) / (0.1 * 0.2 * max(matrix.shape) ** 0.5)
            assert sizes.min() > 0.6, name
            assert sizes.max() < 1.4, name

    def test_vectors_move_as_with_adamw(self) -> None:
        steps, fresh = self.steps()
        torch.testing.assert_close(steps["bias"], self.adamw_step(fresh["bias"]))

    def test_named_parameters_move_as_with_adamw(self) -> None:
        steps, fresh = self.steps(adamw=["head"])
        torch.testing.assert_close(steps["head.weight"], self.adamw_step(fresh["head.weight"]))
        torch.testing.assert_close(steps["body.weight"], self.steps()[0]["body.weight"])

    def test_a_divided_group_keeps_its_settings(self) -> None:
        groups = self.optimizer(self.weights(), adamw=["head", "b*s"]).param_groups
        assert [group["param_names"] for group in groups] == [["body.weight", "filters"], ["head.weight", "bias"]]
        assert {group["label"] for group in groups} == {"all"}
        assert [group["lr"] for group in groups] == [0.1, 0.1]

    def test_a_name_without_a_parameter_is_refused(self) -> None:
        with pytest.raises(ValueError, match='"heat" matches no parameter'):
            self.optimizer(self.weights(), adamw=["heat"])
