"""Build precision, activation checkpointing and strategy from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.core.torch_private import compile_call
from paceline.engine.precision.base import Precision
from paceline.engine.precision.mixed import make_precision
from paceline.engine.strategies.deterministic import DeterministicStrategy
from paceline.engine.strategies.single import SingleStrategy
from paceline.recipe.build_context import BuildContext

_SHARDED = ("fsdp", "zero")


def checkpoint_activations(context: BuildContext, model: nn.Module) -> list[str]:
    """Apply activation checkpointing and return the names of its blocks."""
    part = context.recipe.train.activation_checkpointing
    with context.error_context("train.activation_checkpointing"):
        names: list[str] = context.make("activation_checkpointing", part.name, part).apply(model)
    return names


def choose_precision(context: BuildContext) -> Precision:
    """The precision of the run."""
    train = context.recipe.train
    with context.error_context("train.precision"):
        return make_precision(train.precision, context.world.device, train.loss_scale, train.keep_norms_fp32)


def may_continue(context: BuildContext) -> bool:
    """Whether steps may be skipped, so that buffers must be restorable."""
    train = context.recipe.train
    return train.on_nonfinite == "skip" or train.precision in ("fp16", "O1", "O2", "O3")


def shard(context: BuildContext, model: nn.Module, trial: Callable[[], object]) -> SingleStrategy | None:
    """Shard the parameters, for strategies that do, before the optimizer is built."""
    if context.recipe.train.strategy.name not in _SHARDED:
        return None
    strategy = _strategy(context, model)
    if _parameter_format(context) != "fp32":
        with torch.no_grad(), strategy.unchanged(), _refusing_types(context):
            trial()
        strategy.reshard()
    return strategy


def _parameter_format(context: BuildContext) -> str:
    return str((context.recipe.train.strategy.model_extra or {}).get("parameters", "fp32"))


@contextmanager
def _refusing_types(context: BuildContext) -> Iterator[None]:
    """Raise if the model mixes parameters of this dtype with float32 tensors of its own."""
    try:
        yield
    except RuntimeError as error:
        if "type" not in str(error):
            raise
        place, name = context.checked.locate("train.strategy.parameters"), _parameter_format(context)
        reason = str(error).strip().split("\n")[0]
        raise RecipeError(
            f"{place}: the model does not compute with {name} parameters ({reason});"
            f" use fp32 with train.precision {name}"
        ) from error


def wrap(context: BuildContext, model: nn.Module) -> SingleStrategy:
    """Wrap the model, for strategies that replicate, after the optimizer is built."""
    train = context.recipe.train
    if train.compile:
        compile_call(model)
    if train.reproducible == "world":
        return DeterministicStrategy(model, context.world)
    return _strategy(context, model)


def _strategy(context: BuildContext, model: nn.Module) -> SingleStrategy:
    part, world = context.recipe.train.strategy, context.world
    name = part.name
    if name in ("single", "dp") and world.size > 1:
        message = f"{name} needs one process, got {world.size}; use ddp, or --procs 1"
        raise RecipeError(f"{context.checked.locate('train.strategy')}: {message}")
    devices = list(range(torch.cuda.device_count())) if world.device.type == "cuda" else []
    arguments: dict[str, Any] = dict(part.model_extra or {})
    with context.error_context("train.strategy"):
        made: SingleStrategy = context.call(
            "strategy",
            name,
            arguments,
            model=model,
            world=world,
            devices=devices,
            is_exact=context.recipe.train.reproducible != "off",
        )
    return made
