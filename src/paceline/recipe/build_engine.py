"""What a run computes with, from a recipe: precision, activation checkpointing, and how processes share the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.core.allocation import keep_freed_memory
from paceline.core.errors import RecipeError
from paceline.engine.mixed_precision import make_precision
from paceline.engine.ordered import OrderedTree
from paceline.engine.parallel import SingleProcess
from paceline.engine.precision import Precision
from paceline.engine.remat import apply_remat
from paceline.models.layout import use_channels_last
from paceline.models.sync_norm import convert_sync_batchnorm
from paceline.recipe.workshop import Workshop

_SHARDED = ("fsdp", "zero")


def settle_process(shop: Workshop) -> int:
    """Fix what torch does in this process: threads, and deterministic algorithms if asked for."""
    train = shop.recipe.train
    threads = automatic_threads(shop) if train.threads == "auto" else train.threads
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(train.reproducible != "off")
    # Meant for finding kernels that read what they should write; it costs a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = train.reproducible == "off"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if shop.mesh.device.type == "cpu":
        keep_freed_memory()
    return threads


def automatic_threads(shop: Workshop) -> int:
    """The machine's cores divided among its processes; where processes must not matter, one."""
    if shop.recipe.train.reproducible == "world":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // shop.mesh.local_world)


def prepare_model(shop: Workshop, model: nn.Module) -> None:
    """Make the model compute as the recipe wants, before anything holds its parameters."""
    train = shop.recipe.train
    if train.sync_bn:
        with shop.speaking_of("train.sync_bn"):
            if not convert_sync_batchnorm(model):
                raise RecipeError(f"{shop.checked.locate('train.sync_bn')}: the model has no BatchNorm layers to join")
    if train.channels_last:
        use_channels_last(model)


def recompute(shop: Workshop, model: nn.Module, trial: Callable[[], object]) -> list[str]:
    """Have activations computed again as the recipe wants; the names of the blocks that are."""
    part = shop.recipe.model.checkpointing
    with shop.speaking_of("model.checkpointing"):
        return apply_remat(model, shop.make("checkpointing", part.name, part), trial)


def choose_precision(shop: Workshop) -> Precision:
    """In which number format the run computes."""
    train = shop.recipe.train
    with shop.speaking_of("train.precision"):
        return make_precision(train.precision, shop.mesh.device, train.loss_scale, train.keep_norms_fp32)


def may_skip(shop: Workshop) -> bool:
    """Whether updates may be left out, so that what they changed has to be put back."""
    train = shop.recipe.train
    return train.on_nonfinite == "skip" or train.precision in ("fp16", "O1", "O2", "O3")


def shard(shop: Workshop, model: nn.Module) -> SingleProcess | None:
    """For strategies that cut parameters into parts, before an optimizer is made over them."""
    return _strategy(shop, model) if shop.recipe.train.strategy.name in _SHARDED else None


def wrap(shop: Workshop, model: nn.Module) -> SingleProcess:
    """For the others, when the optimizer is made and weights have the type that they will have."""
    train = shop.recipe.train
    if train.compile:
        _compile(model)
    if train.reproducible == "world":
        return OrderedTree(model, shop.mesh)
    return _strategy(shop, model)


def _compile(model: nn.Module) -> None:
    """Have torch translate the model when it is first called; `compile()` of a plain nn.Sequential does nothing."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call)


def _strategy(shop: Workshop, model: nn.Module) -> SingleProcess:
    part, mesh = shop.recipe.train.strategy, shop.mesh
    name = part.name
    if name == "auto":
        name = "ddp" if mesh.world > 1 else "single"
    if name in ("single", "dp") and mesh.world > 1:
        message = f"{name} is for one process, but {mesh.world} were started; use ddp, or --procs 1"
        raise RecipeError(f"{shop.checked.locate('train.strategy')}: {message}")
    devices = list(range(torch.cuda.device_count())) if mesh.device.type == "cuda" else []
    arguments: dict[str, Any] = dict(part.model_extra or {})
    with shop.speaking_of("train.strategy"):
        made: SingleProcess = shop.call(
            "strategy",
            name,
            arguments,
            model=model,
            mesh=mesh,
            devices=devices,
            is_exact=shop.recipe.train.reproducible != "off",
        )
    return made
