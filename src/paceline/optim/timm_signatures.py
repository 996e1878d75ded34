"""The arguments of timm's optimizers, as JSON Schema for the registry's table."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin

LEFT_OUT = {
    "adahessian": "needs second derivatives",
    "kron": "draws from a random generator of its own, which a checkpoint cannot hold",
    "kronc": "as kron",
    "kronw": "as kron",
    "radamlegacy": "takes the learning rate of one group for the others; `radam` does not",
}
"""Why some have no name here. What timm only passes on to other packages (bnb…, fused…) is left out too."""

# Given by the recipe's own keys, chosen by `make_optimizer`, or without use in training.
_HIDDEN = {
    *("params", "lr", "weight_decay"),
    *("foreach", "fused", "capturable", "differentiable"),
    *("maximize", "verbose", "adamw_lr"),
}
_MOMENTUM = 0.9  # what timm gives to all that take momentum, whatever their own default
_TYPES = {
    bool: "boolean", int: "integer", float: "number", str: "string", tuple: "array", list: "array", type(None): "null",
}  # fmt: skip


def timm_defaults(info: Any) -> dict[str, Any]:
    """What timm gives an optimizer under one of its names, from timm's description of it."""
    momentum = {"momentum": _MOMENTUM} if info.has_momentum else {}
    return momentum | (info.defaults or {})


def timm_signatures() -> dict[str, dict[str, Any]]:
    """Each optimizer's arguments, as the installed timm has them."""
    from paceline.core.torchvision_ops import import_torchvision

    import_torchvision()  # timm imports it, so it must come in through our door
    from timm.optim import get_optimizer_info, list_optimizers

    infos = {name: get_optimizer_info(name) for name in sorted(list_optimizers()) if name not in LEFT_OUT}
    return {
        name: _signature(info.opt_class, timm_defaults(info))
        for name, info in infos.items()
        if not isinstance(info.opt_class, str)
    }


def _signature(optimizer: Callable[..., Any], defaults: dict[str, Any]) -> dict[str, Any]:
    arguments = {}
    for name, parameter in inspect.signature(optimizer, eval_str=True).parameters.items():
        if name not in _HIDDEN:
            default = defaults.get(name, parameter.default)
            found = _types(parameter.annotation, default)
            types = [_node(each, default) for each in sorted(found, key=lambda each: (each == "null", each))]
            arguments[name] = (types[0] if len(types) == 1 else {"anyOf": types}) | {"default": _plain(default)}
    return arguments


def _types(annotation: Any, default: Any) -> set[str]:
    if annotation is inspect.Parameter.empty:
        # Without annotations, 0 stands for a number: `momentum=0`.
        return {"number" if type(default) is int else _TYPES[type(default)]}
    is_union = get_origin(annotation) in (Union, types.UnionType)
    found = {_type(each) for each in (get_args(annotation) if is_union else [annotation])} - {None}
    return {each for each in found if each} - ({"integer"} if "number" in found else set())


def _type(annotation: Any) -> str | None:
    return _TYPES.get(get_origin(annotation) or annotation)


def _node(kind: str, default: Any) -> dict[str, Any]:
    """The schema of one type; a list has as many numbers as the default."""
    if kind != "array":
        return {"type": kind}
    has_none = isinstance(default, tuple | list) and None in default
    items = {"anyOf": [{"type": "number"}, {"type": "null"}]} if has_none else {"type": "number"}
    length = {"minItems": len(default), "maxItems": len(default)} if isinstance(default, tuple | list) else {}
    return {"type": "array", "items": items, **length}


def _plain(default: Any) -> Any:
    if default is None or isinstance(default, bool | int | float | str):
        return default
    return list(default) if isinstance(default, tuple | list) else str(default).removeprefix("torch.")  # a dtype
