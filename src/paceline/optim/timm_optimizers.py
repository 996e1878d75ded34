"""timm's optimizers as `timm/NAME`, and `muon`, which sorts its parameters itself."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from pydantic import Field
from torch.optim import Optimizer

from paceline.core.arguments import PartialShare, Positive
from paceline.core.registry import Library, register
from paceline.core.torchvision_ops import import_torchvision
from paceline.models.patterns import matcher
from paceline.optim.optimizers import Betas, Group, Groups, construct

EXCLUDED = {
    "adahessian": "needs second derivatives",
    "kron": "has its own random generator, which a checkpoint cannot hold",
    "kronc": "as kron",
    "kronw": "as kron",
    "radamlegacy": "uses the learning rate of one group for the others; `radam` does not",
}
"""Why some have no name here. Those of other packages that timm only wraps (bnb…, fused…) are excluded too."""

# Set by the recipe's own keys or by `make_optimizer`, or not useful in training.
_HIDDEN = {
    *("params", "lr", "weight_decay"),
    *("foreach", "fused", "capturable", "differentiable"),
    *("maximize", "verbose", "adamw_lr"),
}
_MOMENTUM = 0.9  # timm's for all that take momentum, whatever their own default
_TYPES = {
    bool: "boolean", int: "integer", float: "number", str: "string", tuple: "array", list: "array", type(None): "null",
}  # fmt: skip


def timm_defaults(info: Any) -> dict[str, Any]:
    """timm's default arguments of an optimizer, from its `OptimInfo`."""
    momentum = {"momentum": _MOMENTUM} if info.has_momentum else {}
    return momentum | (info.defaults or {})


def timm_signatures() -> dict[str, dict[str, Any]]:
    """The arguments of each optimizer of the installed timm, as JSON Schema for the registry."""
    import_torchvision()  # timm imports it, which fails without its compiled operators
    from timm.optim import get_optimizer_info, list_optimizers

    infos = {name: get_optimizer_info(name) for name in sorted(list_optimizers()) if name not in EXCLUDED}
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
        # Without annotations, 0 means a float: `momentum=0`.
        return {"number" if type(default) is int else _TYPES[type(default)]}
    is_union = get_origin(annotation) in (Union, types.UnionType)
    members = get_args(annotation) if is_union else (annotation,)
    found = {kind for each in members if (kind := _TYPES.get(get_origin(each) or each))}
    return found - ({"integer"} if "number" in found else set())


def _node(kind: str, default: Any) -> dict[str, Any]:
    """The schema of one type; a list is as long as its default."""
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


@register.optimizer("timm/", library=Library("timm", timm_signatures))
def timm_optimizer(name: str, params: Groups, **options: Any) -> Optimizer:
    """An optimizer of timm."""
    import_torchvision()  # timm imports it, which fails without its compiled operators
    from timm.optim import get_optimizer_class, get_optimizer_info

    options = timm_defaults(get_optimizer_info(name)) | options
    optimizer = construct(get_optimizer_class(name, bind_defaults=False), params, **options)
    _make_savable(optimizer)
    return optimizer


@register.optimizer("muon")
def muon(
    params: Groups,
    momentum: PartialShare = 0.95,
    nesterov: bool = False,
    ns_steps: Annotated[int, Field(ge=1, lt=100, description="Newton-Schulz iterations.")] = 5,
    eps: Positive = 1e-7,
    adjust_lr_fn: Annotated[
        Literal["match_rms_adamw", "original", "rms_to_rms"],
        Field(
            description="How a step scales with the shape of its matrix; the default suits AdamW's lr and weight_decay."
        ),
    ] = "match_rms_adamw",
    betas: Betas = (0.9, 0.95),
    fallback_lr_scale: Annotated[
        Positive, Field(description="The learning rate of the AdamW part, as a multiple of lr.")
    ] = 1.0,
    adamw: Annotated[
        Sequence[str],
        Field(description="Names or patterns of further parameters for AdamW, such as heads and embeddings."),
    ] = (),
    **common: Any,
) -> Optimizer:
    """Muon for matrices and filters; AdamW for vectors, very thin matrices and parameters that match `adamw`.

    Muon is meant for hidden layers: list heads and embeddings in `adamw`. Names come from "param_names".
    """
    matchers = {pattern: matcher(pattern) for pattern in adamw}
    named = {name for group in params for name in group.get("param_names", ())}
    for pattern, is_match in matchers.items():
        if not any(map(is_match, named)):
            raise ValueError(f'adamw: "{pattern}" matches no parameter')
    selected = {name for name in named if any(is_match(name) for is_match in matchers.values())}
    own: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "eps": eps}
    own |= {"adjust_lr_fn": adjust_lr_fn, "betas": betas, "fallback_lr_scale": fallback_lr_scale}
    return timm_optimizer("muon", _split(params, selected), **own, **common)


def _split(groups: Sequence[Group], selected: set[str]) -> list[Group]:
    """Each group split into its other parameters and the selected ones, which AdamW optimizes."""
    parts = []
    for group in groups:
        names = group.get("param_names") or [""] * len(group["params"])
        for is_selected in (False, True):
            indices = [index for index, name in enumerate(names) if (name in selected) == is_selected]
            part = {**group, "params": [group["params"][index] for index in indices], "use_fallback": is_selected}
            if "param_names" in group:
                part["param_names"] = [names[index] for index in indices]
            parts += [part] if indices else []
    return parts


def _make_savable(optimizer: Optimizer) -> None:
    """Make the groups of a timm optimizer hold only what a checkpoint can, from the start."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        # These two add a count to their groups in the first step; loading a state needs it before.
        if kind == "Lamb":
            group.setdefault("step", torch.zeros((), device="cpu"))
        elif kind == "Adan":
            group.setdefault("step", 0)
    if any("momentum_dtype" in group for group in optimizer.param_groups):
        optimizer.register_state_dict_post_hook(_name_dtype)
        optimizer.register_load_state_dict_pre_hook(_find_dtype)


def _name_dtype(optimizer: Optimizer, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group["momentum_dtype"] = str(group["momentum_dtype"]).removeprefix("torch.")


def _find_dtype(optimizer: Optimizer, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        if isinstance(group["momentum_dtype"], str):
            group["momentum_dtype"] = getattr(torch, group["momentum_dtype"])
