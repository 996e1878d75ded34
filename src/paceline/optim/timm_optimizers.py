"""The optimizers of timm that recipes can name: `timm/NAME`, and some under a name of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch.optim import Optimizer

from paceline.core.arguments import PartialShare, Positive
from paceline.core.registry import Library, register
from paceline.core.torchvision_ops import import_torchvision
from paceline.models.patterns import matcher
from paceline.optim.fused import Group, construct
from paceline.optim.timm_signatures import timm_defaults, timm_signatures
from paceline.optim.torch_optimizers import Betas, Groups

TrustClip = Annotated[bool, Field(description="Lets a layer's learning rate only be lowered (LARC).")]
AlwaysAdapt = Annotated[bool, Field(description="Adapts layers without weight decay too.")]


@register.optimizer("timm/", library=Library("timm", timm_signatures))
def timm_optimizer(name: str, params: Groups, **options: Any) -> Optimizer:
    """An optimizer of timm by its name there."""
    import_torchvision()  # timm imports it, so it must come in through our door
    from timm.optim import get_optimizer_class, get_optimizer_info

    options = timm_defaults(get_optimizer_info(name)) | options
    optimizer = construct(get_optimizer_class(name, bind_defaults=False), params, **options)
    _make_savable(optimizer)
    return optimizer


@register.optimizer("lamb")
def lamb(
    params: Groups,
    betas: Betas = (0.9, 0.999),
    eps: Positive = 1e-6,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: Annotated[
        Positive | None,
        Field(description="Clips the norm of the whole gradient, apart from the recipe's own clipping; null: not."),
    ] = 1.0,
    trust_clip: TrustClip = False,
    always_adapt: AlwaysAdapt = False,
    **common: Any,
) -> Optimizer:
    """Adam with a trust ratio per layer, for large batches."""
    own = {"bias_correction": bias_correction, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm}
    own |= {"trust_clip": trust_clip, "always_adapt": always_adapt}
    return timm_optimizer("lamb", params, betas=betas, eps=eps, **own, **common)


@register.optimizer("lars")
def lars(
    params: Groups,
    momentum: PartialShare = 0.9,
    dampening: PartialShare = 0.0,
    nesterov: bool = False,
    trust_coeff: Positive = 0.001,
    eps: Positive = 1e-8,
    trust_clip: TrustClip = False,
    always_adapt: AlwaysAdapt = False,
    **common: Any,
) -> Optimizer:
    """SGD with a trust ratio per layer, for large batches."""
    own = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "trust_coeff": trust_coeff, "eps": eps}
    return timm_optimizer("lars", params, **own, trust_clip=trust_clip, always_adapt=always_adapt, **common)


@register.optimizer("lion")
def lion(
    params: Groups,
    betas: Betas = (0.9, 0.99),
    caution: Annotated[bool, Field(description="Leaves out what points against the gradient.")] = False,
    **common: Any,
) -> Optimizer:
    """The sign of a momentum; wants a tenth of AdamW's lr."""
    return timm_optimizer("lion", params, betas=betas, caution=caution, **common)


@register.optimizer("muon")
def muon(
    params: Groups,
    momentum: PartialShare = 0.95,
    nesterov: bool = False,
    ns_steps: Annotated[int, Field(ge=1, lt=100, description="Rounds in which a step is made orthogonal.")] = 5,
    eps: Positive = 1e-7,
    adjust_lr_fn: Annotated[
        Literal["match_rms_adamw", "original", "rms_to_rms"],
        Field(description="How a matrix's step depends on its shape; the default suits AdamW's lr and weight_decay."),
    ] = "match_rms_adamw",
    betas: Betas = (0.9, 0.95),
    fallback_lr_scale: Annotated[
        Positive, Field(description="The learning rate of AdamW's part, as a multiple of lr.")
    ] = 1.0,
    adamw: Annotated[
        Sequence[str],
        Field(description="Names or patterns of further parameters for AdamW, such as heads and embeddings."),
    ] = (),
    **common: Any,
) -> Optimizer:
    """Muon for matrices and filters; AdamW for vectors, very thin matrices and parameters that `adamw` names.

    Muon is meant for hidden layers: heads and embeddings should be named. It looks for names in "param_names".
    """
    matchers = {pattern: matcher(pattern) for pattern in adamw}
    named = {name for group in params for name in group.get("param_names", ())}
    for pattern, is_match in matchers.items():
        if not any(map(is_match, named)):
            raise ValueError(f'adamw: "{pattern}" matches no parameter')
    chosen = {name for name in named if any(is_match(name) for is_match in matchers.values())}
    own: dict[str, Any] = {
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_steps": ns_steps,
        "eps": eps,
        "adjust_lr_fn": adjust_lr_fn,
    }
    own |= {"betas": betas, "fallback_lr_scale": fallback_lr_scale}
    return timm_optimizer("muon", _split(params, chosen), **own, **common)


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
