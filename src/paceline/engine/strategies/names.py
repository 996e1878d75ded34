"""Strategies by their names in a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from paceline.core.arguments import Positive
from paceline.core.registry import register
from paceline.core.world import World
from paceline.engine.activation_checkpointing.blocks import find_blocks
from paceline.engine.strategies.ddp import Compression, DataParallelStrategy, DDPStrategy, SingleStrategy

Patterns = Annotated[
    Sequence[str],
    Field(description="Patterns of the modules that are gathered one at a time; empty: found from the structure."),
]
_Type = Literal["fp32", "bf16", "fp16"]
ParameterType = Annotated[_Type, Field(description="The type in which parameters travel and blocks compute.")]
GradientType = Annotated[_Type, Field(description="The type in which gradients travel.")]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@register.strategy("single")
def single(model: nn.Module) -> SingleStrategy:
    """One process holds the whole model."""
    return SingleStrategy(model)


@register.strategy("dp")
def data_parallel(model: nn.Module, devices: list[int]) -> DataParallelStrategy:
    """One process, several devices."""
    return DataParallelStrategy(model, devices)


@register.strategy("auto")
def auto(model: nn.Module, world: World, is_exact: bool) -> SingleStrategy:
    """`ddp` with several processes, else `single`."""
    return ddp(model, world, is_exact)


@register.strategy("ddp")
def ddp(
    model: nn.Module,
    world: World,
    is_exact: bool,
    static_graph: Annotated[
        bool,
        Field(description="Promises that every pass uses the same parameters in the same way, which saves some work."),
    ] = False,
    find_unused: Annotated[
        bool,
        Field(description="Looks for parameters that a pass does not use; needed where there are any, and costly."),
    ] = False,
    bucket_mb: Annotated[Positive, Field(description="How much is reduced at a time.")] = 25.0,
    compression: Annotated[
        Compression, Field(description="The form in which gradients travel; anything but none loses digits.")
    ] = "none",
) -> SingleStrategy:
    """A replica in every process; a process alone has nobody to exchange anything with."""
    if world.size == 1:
        return SingleStrategy(model)
    return DDPStrategy(model, world, is_exact, static_graph, find_unused, bucket_mb, compression)


@register.strategy("fsdp")
def fsdp(
    model: nn.Module,
    world: World,
    match: Patterns = (),
    parameters: ParameterType = "fp32",
    gradients: GradientType = "fp32",
) -> SingleStrategy:
    """Everything in parts, put together block by block."""
    return _sharded(model, world, match, parameters, gradients, keeps_parameters=False)


@register.strategy("zero")
def zero(
    model: nn.Module,
    world: World,
    match: Patterns = (),
    parameters: ParameterType = "fp32",
    gradients: GradientType = "fp32",
) -> SingleStrategy:
    """Gradients and optimizer state in parts; parameters are put together once a step."""
    return _sharded(model, world, match, parameters, gradients, keeps_parameters=True)


def _sharded(
    model: nn.Module, world: World, match: Sequence[str], parameters: str, gradients: str, keeps_parameters: bool
) -> SingleStrategy:
    from paceline.engine.strategies.fsdp import FSDPStrategy  # takes a while to import

    return FSDPStrategy(model, world, _blocks(model, match), _DTYPES[parameters], _DTYPES[gradients], keeps_parameters)


def _blocks(model: nn.Module, match: Sequence[str]) -> list[list[nn.Module]]:
    """What is put together at a time; a model without blocks is put together as a whole."""
    try:
        return [block.modules() for block in find_blocks(model, match)]
    except ValueError:
        if match:
            raise
        return []
