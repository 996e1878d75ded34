"""Named parts of a run as one tree, and that tree as tensors beside a JSON skeleton."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from paceline.checkpoint.shards import Part
from paceline.core.errors import CheckpointError
from paceline.core.text import pluralize
from paceline.models.memory_format import with_strides_of

Tree = Any
"""Nested dicts (string keys) and lists of tensors and JSON scalars: None, bool, int, float, str."""
JSON = Any


@runtime_checkable
class Stateful(Protocol):
    """A part of a run that remembers something from one step to the next, a user's own included."""

    def state_dict(self) -> Tree:
        """What it remembers, as a tree."""

    def load_state_dict(self, state: Tree, /) -> Any:
        """Continue from there; tuples come back as lists."""


_TENSOR, _FLOAT = "$tensor", "$float"
# How an optimizer computes belongs to the machine that runs it, so it is never taken from a checkpoint.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
_ELEMENTWISE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
_SHOWN = 5
_DEEPEST = 100


def flatten(tree: Tree) -> tuple[dict[str, Tensor], JSON]:
    """The tree's tensors, not copied, under "/"-joined names, and a JSON skeleton that refers to them."""
    leaves, skeleton = flatten_parts(tree)
    for name, leaf in leaves.items():
        if isinstance(leaf, Part):
            raise TypeError(f"{_place((name,))}: is a part of a tensor; expected all of it")
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}, skeleton


def flatten_parts(tree: Tree) -> tuple[dict[str, Tensor | Part], JSON]:
    """As `flatten`, of a tree that may hold parts of tensors too."""
    leaves: dict[str, Tensor | Part] = {}
    return leaves, _take_apart(tree, (), leaves)


def unflatten(tensors: Mapping[str, Tensor], skeleton: JSON) -> Tree:
    """The tree that `flatten` was given; its tuples are lists now."""
    unused = dict(tensors)
    tree = _put_together(unused, skeleton, 0)
    if unused:
        raise CheckpointError(f"the state does not refer to the tensor {next(iter(unused))[:100]!r} saved with it")
    return tree


def _put_together(tensors: dict[str, Tensor], skeleton: JSON, depth: int) -> Tree:
    if depth > _DEEPEST:
        raise CheckpointError(f"the state is nested more than {_DEEPEST} deep")
    if isinstance(skeleton, list):
        return [_put_together(tensors, item, depth + 1) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if _TENSOR in skeleton:
        name = skeleton[_TENSOR]
        if not isinstance(name, str) or name not in tensors:
            raise CheckpointError(f"the state refers to a tensor {repr(name)[:100]} that was not saved with it")
        return tensors.pop(name)  # each is referred to once
    if _FLOAT in skeleton:
        number = skeleton[_FLOAT]
        if number not in ("nan", "inf", "-inf"):
            raise CheckpointError(f"the state has {repr(number)[:100]} for a number that is not finite")
        return float(number)
    return {_plain_key(key): _put_together(tensors, value, depth + 1) for key, value in skeleton.items()}


def _take_apart(value: Tree, path: tuple[str, ...], tensors: dict[str, Tensor | Part]) -> JSON:
    if len(path) > _DEEPEST:
        raise TypeError(f"{_place(path[:5])}/…: a state more than {_DEEPEST} deep cannot be saved")
    if isinstance(value, Tensor | Part):
        name = _join(path)
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{_place(path)}: keys must be strings, found {key!r} ({type(key).__name__})")
        return {_marked_key(key): _take_apart(item, (*path, key), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_take_apart(item, (*path, str(index)), tensors) for index, item in enumerate(value)]
    return _scalar(value, path)


def _scalar(value: Tree, path: tuple[str, ...]) -> JSON:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        # JSON has no literal for these three, so their names are kept.
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    raise TypeError(
        f"{_place(path)}: a {type(value).__name__} cannot be saved; "
        "a state holds dicts, lists, tensors, None, bool, int, float and str"
    )


def _marked_key(key: str) -> str:
    return "$" + key if key.startswith("$") else key


def _plain_key(key: str) -> str:
    return key[1:] if key.startswith("$") else key


def _join(path: tuple[str, ...]) -> str:
    name = "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)
    # safetensors keeps this one name for itself.
    return "~" + name if name == "__metadata__" else name


def _place(path: tuple[str, ...]) -> str:
    return "state " + "/".join(path) if path else "state"


def optimizer_tree(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tree:
    """The optimizer's state by parameter name, however they are grouped; tensors are not copied."""
    packed = optimizer.state_dict()
    names = _names_by_group(optimizer, model)
    name_of: dict[int, str] = {}
    groups = []
    for group, group_names in zip(packed["param_groups"], names, strict=True):
        name_of.update(zip(group["params"], group_names, strict=True))
        groups.append({**_options(group), "names": group_names})
    stray = [key for key in packed["state"] if key not in name_of]
    if stray:
        raise ValueError(f"the optimizer keeps state that belongs to no parameter: {stray[:_SHOWN]}")
    return {
        "kind": type(optimizer).__name__,
        "shapes": _shapes(optimizer, names),
        "state": {name_of[index]: dict(entry) for index, entry in packed["state"].items()},
        "groups": groups,
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tree: Tree) -> None:
    """Put a saved state into an optimizer over the same parameters, bit for bit, however they are grouped.

    The options of a group come back where all of its parameters were in one group when they were saved. What is shaped
    like a parameter gets its strides: files hold none.
    """
    names = _names_by_group(optimizer, model)
    _check_fit(optimizer, names, tree)
    _check_moments(optimizer, names, tree["state"])
    packed = optimizer.state_dict()
    source = {name: number for number, group in enumerate(tree["groups"]) for name in group["names"]}
    if lost := [name for group_names in names for name in group_names if name not in source]:
        raise CheckpointError(f"the saved groups of the optimizer lack {lost[0]}")
    parameters = dict(model.named_parameters())
    saved = {name: _laid_out(_cloned(entry), parameters[name]) for name, entry in tree["state"].items()}
    state: dict[int, Any] = {}
    for group, group_names in zip(packed["param_groups"], names, strict=True):
        sources = {source[name] for name in group_names}
        if len(sources) == 1:
            group.update(_saved_options(group, tree["groups"][sources.pop()]))
        for index, name in zip(group["params"], group_names, strict=True):
            if name in saved:
                state[index] = saved[name]
    optimizer.load_state_dict({**packed, "state": state})
    _keep_dtypes(optimizer, names, saved)


def _names_by_group(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    unknown = sum(id(p) not in name_of for group in optimizer.param_groups for p in group["params"])
    if unknown:
        raise ValueError(f"the model lacks {pluralize(unknown, 'parameter')} of the optimizer")
    return [[name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _shapes(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> dict[str, list[int]]:
    return {
        name: list(parameter.shape)
        for group, group_names in zip(optimizer.param_groups, names, strict=True)
        for parameter, name in zip(group["params"], group_names, strict=True)
    }


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _saved_options(group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    options = {}
    for key, present in _options(group).items():
        if key in saved and key not in _IMPLEMENTATION:
            value = _cloned(saved[key])
            if value is not None and present is not None and _kind(value) != _kind(present):
                raise CheckpointError(f"the optimizer's {key} was saved as {repr(value)[:60]}; here it is {present!r}")
            options[key] = tuple(value) if isinstance(present, tuple) else value
    return options


def _kind(value: Any) -> type:
    """What may stand for what: numbers and tensors of them, lists and tuples, else the same type."""
    if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
        return float
    return list if isinstance(value, tuple) else type(value)


def _check_fit(optimizer: torch.optim.Optimizer, names: list[list[str]], tree: Tree) -> None:
    if tree["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint holds the state of {tree['kind']}, but this run uses {type(optimizer).__name__}"
        )
    here, saved = _shapes(optimizer, names), tree["shapes"]
    differences = [f"{name} {shape}: not in the checkpoint" for name, shape in here.items() if name not in saved]
    differences += [f"{name} {shape}: only in the checkpoint" for name, shape in saved.items() if name not in here]
    differences += [
        f"{name}: {saved[name]} in the checkpoint, {shape} in the model"
        for name, shape in here.items()
        if name in saved and saved[name] != shape
    ]
    if differences:
        more = [f"and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
        lines = "\n".join(f"  {line}" for line in [*differences[:_SHOWN], *more])
        raise CheckpointError(f"the checkpoint's optimizer state does not fit the model:\n{lines}")


def _check_moments(optimizer: torch.optim.Optimizer, names: list[list[str]], saved: dict[str, Any]) -> None:
    # Torch's fused optimizers go through these and the parameter side by side, whatever their shapes are.
    for name, shape in _shapes(optimizer, names).items():
        for key, value in saved.get(name, {}).items():
            if key not in _ELEMENTWISE or value is None:
                continue
            if not isinstance(value, Tensor) or (value.ndim and list(value.shape) != shape):
                found = list(value.shape) if isinstance(value, Tensor) else repr(value)[:60]
                raise CheckpointError(f"the optimizer's {key} of {name} is {found}, the parameter {shape}")


def _cloned(value: Tree) -> Tree:
    # A step changes these tensors in place: the tree must not change with them.
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cloned(item) for item in value]
    return value


def _laid_out(entry: dict[str, Tree], parameter: nn.Parameter) -> dict[str, Tree]:
    return {
        key: with_strides_of(value, parameter)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in entry.items()
    }


def _keep_dtypes(optimizer: torch.optim.Optimizer, names: list[list[str]], saved: dict[str, Any]) -> None:
    # load_state_dict casts to the parameter's dtype, which would round float32 state of bfloat16 parameters.
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], group_names, strict=True):
            for key, value in saved.get(name, {}).items():
                loaded = optimizer.state[parameter][key]
                if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(loaded.device, copy=True)
