"""Making an optimizer in the fastest form that runs on the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.models.patterns import matcher
from paceline.models.torchvision_ops import import_torchvision
from paceline.optim.third_party import timm_defaults

MakesOptimizer = Callable[..., Optimizer]
Group = dict[str, Any]
"""Parameters under "params" with their own "lr" and "weight_decay"; any further keys stay with the group."""

# Where torch has no fused form it chooses itself: over all tensors at once on a GPU, where that is faster than one by
# one; on a CPU it is slower, because each pass over all tensors finds the caches full of others.
_FUSED = {
    "cpu": {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad},
    "cuda": {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW},
}
_FUSED_IN_PARTS = {torch.optim.Adam, torch.optim.AdamW}


def make_optimizer(
    optimizer: MakesOptimizer,
    parameters: Iterable[nn.Parameter] | Iterable[Group],
    lr: float,
    weight_decay: float,
    arguments: dict[str, Any],
) -> Optimizer:
    """The optimizer over groups as they are, or over those of plain parameters that learn; fused where that is faster.

    `lr` and `weight_decay` are for whatever a group does not set itself.
    """
    groups = _as_groups(parameters)
    if not any(group["params"] for group in groups):
        raise ValueError("there is nothing to learn: all parameters are frozen")
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    options |= {"lr": lr, "weight_decay": weight_decay}
    if not _takes(optimizer, "weight_decay"):
        _refuse_decay(optimizer, groups, weight_decay)
        del options["weight_decay"]
    return _construct(optimizer, groups, options)


def timm_optimizer(name: str, params: Sequence[Group], **options: Any) -> Optimizer:
    """An optimizer of timm by its name there."""
    import_torchvision()  # timm imports it, so it must come in through our door
    from timm.optim import get_optimizer_class, get_optimizer_info

    options = timm_defaults(get_optimizer_info(name)) | options
    optimizer = _construct(get_optimizer_class(name, bind_defaults=False), params, options)
    _make_savable(optimizer)
    return optimizer


lamb = partial(timm_optimizer, "lamb")
lars = partial(timm_optimizer, "lars")
lion = partial(timm_optimizer, "lion")


def muon(params: Sequence[Group], adamw: Sequence[str] = (), **options: Any) -> Optimizer:
    """Muon for matrices and filters; AdamW for vectors, very thin matrices and parameters that `adamw` names.

    Muon is meant for hidden layers: heads and embeddings should be named. It looks for names in "param_names".
    """
    matchers = {pattern: matcher(pattern) for pattern in adamw}
    named = {name for group in params for name in group.get("param_names", ())}
    for pattern, is_match in matchers.items():
        if not any(map(is_match, named)):
            raise ValueError(f'adamw: "{pattern}" matches no parameter')
    chosen = {name for name in named if any(is_match(name) for is_match in matchers.values())}
    return timm_optimizer("muon", _split(params, chosen), **options)


def _split(groups: Sequence[Group], chosen: set[str]) -> list[Group]:
    """The groups, each without the chosen parameters and followed by one of these, which AdamW takes."""
    parts = []
    for group in groups:
        names = group.get("param_names") or [""] * len(group["params"])
        for is_chosen in (False, True):
            of_part = [index for index, name in enumerate(names) if (name in chosen) == is_chosen]
            part = {**group, "params": [group["params"][index] for index in of_part], "use_fallback": is_chosen}
            if "param_names" in group:
                part["param_names"] = [names[index] for index in of_part]
            parts += [part] if of_part else []
    return parts


def _as_groups(parameters: Iterable[nn.Parameter] | Iterable[Group]) -> list[Group]:
    given = list(parameters)
    groups = [dict(each) for each in given if isinstance(each, dict)]
    learning = [each for each in given if isinstance(each, nn.Parameter) and each.requires_grad]
    return groups or [{"params": learning}]


def _takes(optimizer: MakesOptimizer, name: str) -> bool:
    parameters = inspect.signature(optimizer).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _refuse_decay(optimizer: MakesOptimizer, groups: list[Group], weight_decay: float) -> None:
    asked = [value for value in (weight_decay, *(group.get("weight_decay", 0) for group in groups)) if value]
    if asked:
        name = getattr(optimizer, "__name__", str(optimizer))
        raise ValueError(f"{name} has no weight decay: expected weight_decay 0 everywhere, got {asked[0]:g}")


def _construct(optimizer: MakesOptimizer, groups: Sequence[Group], options: dict[str, Any]) -> Optimizer:
    parameters = [parameter for group in groups for parameter in group["params"]]
    devices = {parameter.device.type for parameter in parameters}
    can_fuse = (
        len(devices) == 1
        and optimizer in _FUSED.get(devices.pop(), ())
        and (optimizer in _FUSED_IN_PARTS or not any(hasattr(parameter, "placements") for parameter in parameters))
        and all(parameter.is_floating_point() for parameter in parameters)
        and not options.get("dampening")  # see _begin_momentum
    )
    if not can_fuse:
        return optimizer(groups, **options)
    fused = optimizer(groups, fused=True, **options)
    if isinstance(fused, torch.optim.SGD):
        fused.register_step_pre_hook(_begin_momentum)
    return fused


def _begin_momentum(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give parameters whose first gradient this is a momentum of 0, which is how they begin without dampening.

    The fused step of torch fails on its own where some parameters of a group have one and others do not yet.
    """
    state = optimizer.state
    for group in optimizer.param_groups:
        if group["momentum"]:
            for parameter in group["params"]:
                if parameter.grad is not None and state[parameter].get("momentum_buffer") is None:
                    state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _make_savable(optimizer: Optimizer) -> None:
    """Have an optimizer of timm keep in its groups, from the start, only what a checkpoint can hold."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        # These two add a count to their groups in the first step; a fresh optimizer must have a place for a saved one.
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
