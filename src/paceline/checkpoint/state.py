"""The state of a run as tensors and a JSON skeleton, and optimizer state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from paceline.checkpoint.shards import TensorShard
from paceline.core.errors import CheckpointError
from paceline.core.text import pluralize
from paceline.models.placement import with_strides_of

Tree = Any
"""Nested dicts (string keys) and lists of tensors and JSON scalars: None, bool, int, float, str."""
JSON = Any


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is saved and resumed, yours included."""

    def state_dict(self) -> Tree:
        """Its state, as a tree."""

    def load_state_dict(self, state: Tree, /) -> Any:
        """Resume from a state; tuples come back as lists."""


_TENSOR, _FLOAT = "$tensor", "$float"
# These depend on the machine, so they are never taken from a checkpoint.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
_ELEMENTWISE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
_MAX_LINES = 5
_MAX_DEPTH = 100


def flatten(tree: Tree) -> tuple[dict[str, Tensor], JSON]:
    """The tree's tensors by "/"-joined names, not copied, and a JSON skeleton that refers to them."""
    leaves, skeleton = flatten_shards(tree)
    for name, leaf in leaves.items():
        if isinstance(leaf, TensorShard):
            raise TypeError(f"{_where((name,))}: is a shard; expected the full tensor")
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}, skeleton


def flatten_shards(tree: Tree) -> tuple[dict[str, Tensor | TensorShard], JSON]:
    """As `flatten`, of a tree that may contain shards."""
    leaves: dict[str, Tensor | TensorShard] = {}
    return leaves, _flatten(tree, (), leaves)


def unflatten(tensors: Mapping[str, Tensor], skeleton: JSON) -> Tree:
    """The tree that `flatten` took apart; tuples come back as lists."""
    unused = dict(tensors)
    tree = _unflatten(unused, skeleton, 0)
    if unused:
        raise CheckpointError(f"the state does not refer to the saved tensor {next(iter(unused))[:100]!r}")
    return tree


def _unflatten(tensors: dict[str, Tensor], skeleton: JSON, depth: int) -> Tree:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"the state is more than {_MAX_DEPTH} levels deep")
    if isinstance(skeleton, list):
        return [_unflatten(tensors, item, depth + 1) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if _TENSOR in skeleton:
        name = skeleton[_TENSOR]
        if not isinstance(name, str) or name not in tensors:
            raise CheckpointError(f"the state refers to a tensor {repr(name)[:100]} that was not saved")
        return tensors.pop(name)  # each is referred to once
    if _FLOAT in skeleton:
        number = skeleton[_FLOAT]
        if number not in ("nan", "inf", "-inf"):
            raise CheckpointError(f"the state has {repr(number)[:100]} for a number that is not finite")
        return float(number)
    return {_unescape_key(key): _unflatten(tensors, value, depth + 1) for key, value in skeleton.items()}


def _flatten(value: Tree, path: tuple[str, ...], tensors: dict[str, Tensor | TensorShard]) -> JSON:
    if len(path) > _MAX_DEPTH:
        raise TypeError(f"{_where(path[:5])}/…: expected a state at most {_MAX_DEPTH} levels deep")
    if isinstance(value, Tensor | TensorShard):
        name = _join(path)
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{_where(path)}: expected string keys, got {key!r} ({type(key).__name__})")
        return {_escape_key(key): _flatten(item, (*path, key), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_flatten(item, (*path, str(index)), tensors) for index, item in enumerate(value)]
    return _scalar(value, path)


def _scalar(value: Tree, path: tuple[str, ...]) -> JSON:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        # JSON has no literal for nan, inf and -inf.
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    raise TypeError(
        f"{_where(path)}: a {type(value).__name__} cannot be saved; expected dicts, lists, tensors, None, bool, int,"
        " float or str"
    )


def _escape_key(key: str) -> str:
    return "$" + key if key.startswith("$") else key


def _unescape_key(key: str) -> str:
    return key[1:] if key.startswith("$") else key


def _join(path: tuple[str, ...]) -> str:
    name = "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)
    # safetensors reserves this name.
    return "~" + name if name == "__metadata__" else name


def _where(path: tuple[str, ...]) -> str:
    return "state " + "/".join(path) if path else "state"


def optimizer_tree(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tree:
    """The optimizer's state by parameter name, whatever the groups; tensors are not copied."""
    packed = optimizer.state_dict()
    groups = list(zip(packed["param_groups"], _parameters_by_group(optimizer, model), strict=True))
    name_of = {index: name for group, named in groups for index, name in zip(group["params"], named, strict=True)}
    unknown = [key for key in packed["state"] if key not in name_of]
    if unknown:
        raise ValueError(f"the optimizer has state of unknown parameters: {unknown[:_MAX_LINES]}")
    return {
        "kind": type(optimizer).__name__,
        "shapes": {name: list(parameter.shape) for _, named in groups for name, parameter in named.items()},
        "state": {name_of[index]: dict(entry) for index, entry in packed["state"].items()},
        "groups": [{**_options(group), "names": list(named)} for group, named in groups],
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tree: Tree) -> None:
    """Load a saved state into an optimizer over the same parameters, bit-identically, whatever the groups.

    A group's options are restored if all its parameters were in one group when they were saved. State with the shape of
    its parameter gets the parameter's strides, which files do not hold.
    """
    groups = _parameters_by_group(optimizer, model)
    parameters = {name: parameter for named in groups for name, parameter in named.items()}
    _check_match(optimizer, parameters, tree)
    _check_moments(parameters, tree["state"])
    packed = optimizer.state_dict()
    source = {name: number for number, group in enumerate(tree["groups"]) for name in group["names"]}
    if missing := [name for name in parameters if name not in source]:
        raise CheckpointError(f"the saved groups of the optimizer lack {missing[0]}")
    saved = {name: _clone(tree["state"][name], parameters[name]) for name in parameters if name in tree["state"]}
    state: dict[int, Any] = {}
    for group, named in zip(packed["param_groups"], groups, strict=True):
        sources = {source[name] for name in named}
        if len(sources) == 1:
            group.update(_saved_options(group, tree["groups"][sources.pop()]))
        state |= {index: saved[name] for index, name in zip(group["params"], named, strict=True) if name in saved}
    optimizer.load_state_dict({**packed, "state": state})
    # It casts to the parameter's dtype, which would round float32 state of bfloat16 parameters.
    for name, entry in saved.items():
        loaded = optimizer.state[parameters[name]]
        for key, value in entry.items():
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device, copy=True)


def _parameters_by_group(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[dict[str, nn.Parameter]]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    unknown = sum(id(p) not in name_of for group in optimizer.param_groups for p in group["params"])
    if unknown:
        raise ValueError(f"the optimizer has {pluralize(unknown, 'parameter')} that the model lacks")
    return [{name_of[id(each)]: each for each in group["params"]} for group in optimizer.param_groups]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _saved_options(group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    options = {}
    for key, present in _options(group).items():
        if key in saved and key not in _IMPLEMENTATION:
            value = _clone(saved[key])
            if value is not None and present is not None and _kind(value) != _kind(present):
                raise CheckpointError(f"the optimizer's {key} was saved as {repr(value)[:60]}; here it is {present!r}")
            options[key] = tuple(value) if isinstance(present, tuple) else value
    return options


def _kind(value: Any) -> type:
    """The type to compare: numbers and tensors are alike, and so are lists and tuples."""
    if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
        return float
    return list if isinstance(value, tuple) else type(value)


def _check_match(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], tree: Tree) -> None:
    if tree["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint holds the state of {tree['kind']}, but this run uses {type(optimizer).__name__}"
        )
    here, saved = {name: list(parameter.shape) for name, parameter in parameters.items()}, tree["shapes"]
    differences = [f"{name} {shape}: not in the checkpoint" for name, shape in here.items() if name not in saved]
    differences += [f"{name} {shape}: only in the checkpoint" for name, shape in saved.items() if name not in here]
    differences += [
        f"{name}: {saved[name]} in the checkpoint, {shape} in the model"
        for name, shape in here.items()
        if name in saved and saved[name] != shape
    ]
    if differences:
        more = [f"and {len(differences) - _MAX_LINES} more"] if len(differences) > _MAX_LINES else []
        lines = "\n".join(f"  {line}" for line in [*differences[:_MAX_LINES], *more])
        raise CheckpointError(f"the checkpoint's optimizer state does not match the model:\n{lines}")


def _check_moments(parameters: dict[str, nn.Parameter], saved: dict[str, Any]) -> None:
    # torch's fused optimizers iterate over these and the parameter without comparing shapes.
    for name, parameter in parameters.items():
        for key, value in saved.get(name, {}).items():
            if key not in _ELEMENTWISE or value is None:
                continue
            if not isinstance(value, Tensor) or (value.ndim and value.shape != parameter.shape):
                found = list(value.shape) if isinstance(value, Tensor) else repr(value)[:60]
                raise CheckpointError(f"the optimizer's {key} of {name} is {found}, the parameter {[*parameter.shape]}")


def _clone(value: Tree, parameter: nn.Parameter | None = None) -> Tree:
    # A step changes these tensors in place; the tree must not change.
    if isinstance(value, dict):
        return {key: _clone(item, parameter) for key, item in value.items()}
    if isinstance(value, list):
        return [_clone(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    return with_strides_of(copy, parameter) if parameter is not None and copy.shape == parameter.shape else copy
