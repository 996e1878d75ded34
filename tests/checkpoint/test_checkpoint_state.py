"""Trees survive the way through JSON and safetensors; optimizers continue as if they had never stopped."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.checkpoint.files import TensorFile
from paceline.checkpoint.state import flatten, load_optimizer, optimizer_tree, unflatten
from paceline.core.errors import CheckpointError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def through_bytes(tree: Any) -> Any:
    """The tree after a trip through the bytes that would be on disk, read by safetensors' own reader."""
    tensors, skeleton = flatten(tree)

    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    text = json.dumps(skeleton)
    content = TensorFile(tensors)
    raw = b"".join(content)
    assert len(raw) == content.size
    return unflatten(safetensors.torch.load(raw), json.loads(text, parse_constant=refuse))


def same(left: Any, right: Any) -> bool:
    """Equal in type and to the last bit; a tuple counts as a list."""
    if isinstance(left, Tensor):
        return (
            isinstance(right, Tensor)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and left.contiguous().view(-1).view(torch.uint8).tolist()
            == right.contiguous().view(-1).view(torch.uint8).tolist()
        )
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return repr(left) == repr(right)
    return type(left) is type(right) and bool(left == right)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.randint(
        0, 256, (math.prod(shape),), generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    return values.to(draw(st.sampled_from(DTYPES))).reshape(shape)


KEYS = st.text(max_size=4) | st.sampled_from(
    ["a/b", "/", "a~1b", "~", "$tensor", "$float", "$", "$$x", "__metadata__", "~__metadata__", "0", ""]
)
LEAVES = tensors() | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_any_tree_comes_back_to_the_last_bit(tree: Any) -> None:
    assert same(tree, through_bytes(tree))


def test_names_say_where_a_tensor_was() -> None:
    value = torch.tensor(2.5)
    found, skeleton = flatten({"ema": {"conv.weight": value, "decay": [0.5, math.inf]}, "a/b": [value]})
    assert list(found) == ["ema/conv.weight", "a~1b/0"]
    assert skeleton == {
        "ema": {"conv.weight": {"$tensor": "ema/conv.weight"}, "decay": [0.5, {"$float": "inf"}]},
        "a/b": [{"$tensor": "a~1b/0"}],
    }


def test_tensors_that_share_memory_are_written_each() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tree = {
        "whole": whole,
        "same": whole,
        "row": whole[1],
        "turned": whole.t(),
        "parameter": nn.Parameter(whole),
    }
    back = through_bytes(tree)
    assert same({name: value.detach() for name, value in tree.items()}, back)
    back["whole"].zero_()
    assert back["same"].equal(whole)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"groups": {0: 1.0}}, r"groups: .* 0 \(int\)"),
        ({"a": [1, {2, 3}]}, "a/1: a set "),
        ({"when": object()}, "when: a object "),
    ],
)
def test_what_cannot_be_saved_is_named(tree: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        flatten(tree)


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="spectrum"):
        TensorFile({"spectrum": torch.zeros(2, dtype=torch.complex128)})


def test_a_skeleton_without_its_tensor_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="'lost'"):
        unflatten({}, {"ema": {"$tensor": "lost"}})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "sgd momentum fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def network(width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        images = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()


def decay_split(model: nn.Module) -> list[dict[str, Any]]:
    wide = [p for p in model.parameters() if p.ndim > 1]
    narrow = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": wide, "weight_decay": 0.05}, {"params": narrow, "weight_decay": 0.0}]


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_optimizer_walks_the_same_path(kind: str, steps: int) -> None:
    model = network()
    optimizer = OPTIMIZERS[kind](decay_split(model))
    train(model, optimizer, range(steps))
    tree = through_bytes(optimizer_tree(optimizer, model))

    other = network()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = OPTIMIZERS[kind](decay_split(other))
    load_optimizer(resumed, other, tree)
    assert same(optimizer_tree(optimizer, model), through_bytes(optimizer_tree(resumed, other)))

    train(model, optimizer, range(steps, 2 * steps + 3))
    train(other, resumed, range(steps, 2 * steps + 3))
    assert same(dict(model.state_dict()), dict(other.state_dict()))


def test_loading_does_not_tie_the_optimizer_to_the_tree() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    tree = copy.deepcopy(optimizer_tree(optimizer, model))
    before = copy.deepcopy(tree)
    load_optimizer(optimizer, model, tree)
    train(model, optimizer, range(2, 4))
    assert same(before, through_bytes(tree))


def test_state_follows_the_names_when_the_groups_are_cut_otherwise() -> None:
    model = network()
    optimizer = torch.optim.AdamW(decay_split(model), lr=0.01)
    train(model, optimizer, range(3))
    tree = optimizer_tree(optimizer, model)

    turned = torch.optim.AdamW([{"params": list(model.parameters())[::-1], "lr": 0.5}], betas=(0.8, 0.9))
    load_optimizer(turned, model, tree)
    for parameter in model.parameters():
        assert same(dict(optimizer.state[parameter]), through_bytes(dict(turned.state[parameter])))
    # Its parameters come from two groups with different options: there is no one answer, so its own stay.
    assert (turned.param_groups[0]["lr"], turned.param_groups[0]["betas"]) == (0.5, (0.8, 0.9))

    parts = [{"params": [p]} for p in model.parameters()]
    apart = torch.optim.AdamW(parts, lr=0.5, betas=(0.8, 0.9), fused=True)
    load_optimizer(apart, model, through_bytes(tree))
    group = apart.param_groups[1]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.9, 0.999), 0.0)
    assert group["fused"] is True


class FineSum(torch.optim.Optimizer):
    """Keeps a float32 sum for parameters of lower precision."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["sum"] = state.get("sum", torch.zeros(parameter.shape)) + parameter.grad.float() / 3


def test_state_finer_than_its_parameter_is_not_rounded() -> None:
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = FineSum(model.parameters(), {})
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    tree = through_bytes(optimizer_tree(optimizer, model))
    fresh = FineSum(model.parameters(), {})
    load_optimizer(fresh, model, tree)
    third = torch.full((2, 3), 1 / 3)
    assert fresh.state[model.weight]["sum"].equal(third)
    assert fresh.state[model.weight]["sum"] is not tree["state"]["weight"]["sum"]


def test_other_shapes_and_names_are_reported() -> None:
    small, large = network(5), network(6)
    tree = optimizer_tree(torch.optim.SGD(small.parameters(), lr=0.1), small)
    with pytest.raises(CheckpointError, match=r"0\.weight: \[5, 4\] in the checkpoint, \[6, 4\] in the model"):
        load_optimizer(torch.optim.SGD(large.parameters(), lr=0.1), large, tree)
    only_head = torch.optim.SGD(small[3].parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"0\.weight \[5, 4\]: only in the checkpoint"):
        load_optimizer(only_head, small, tree)
    deeper = nn.Sequential(*small, nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match=r"4\.weight \[3, 3\]: not in the checkpoint"):
        load_optimizer(torch.optim.SGD(deeper.parameters(), lr=0.1), deeper, tree)


def test_another_kind_of_optimizer_is_refused() -> None:
    model = network()
    tree = optimizer_tree(torch.optim.Adam(model.parameters()), model)
    with pytest.raises(CheckpointError, match=r"Adam.* SGD"):
        load_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tree)


def test_parameters_from_outside_the_model_have_no_name() -> None:
    model = network()
    outside = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match="1 parameter"):
        optimizer_tree(outside, model)
