"""Strategies by their names in a recipe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.core.mesh import Mesh
from paceline.engine.blocks import find_blocks
from paceline.engine.parallel import Compression, DataParallel, Replicated, SingleProcess

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def single(model: nn.Module) -> SingleProcess:
    """One process holds the whole model."""
    return SingleProcess(model)


def data_parallel(model: nn.Module, devices: list[int]) -> DataParallel:
    """One process, several devices."""
    return DataParallel(model, devices)


def ddp(
    model: nn.Module,
    mesh: Mesh,
    is_exact: bool,
    static_graph: bool = False,
    find_unused: bool = False,
    bucket_mb: float = 25.0,
    compression: Compression = "none",
) -> SingleProcess:
    """A replica in every process; a process alone has nobody to exchange anything with."""
    if mesh.world == 1:
        return SingleProcess(model)
    return Replicated(model, mesh, is_exact, static_graph, find_unused, bucket_mb, compression)


def fsdp(
    model: nn.Module, mesh: Mesh, match: Sequence[str] = (), parameters: str = "fp32", gradients: str = "fp32"
) -> SingleProcess:
    """Everything in parts, put together block by block."""
    return _sharded(model, mesh, match, parameters, gradients, keeps_parameters=False)


def zero(
    model: nn.Module, mesh: Mesh, match: Sequence[str] = (), parameters: str = "fp32", gradients: str = "fp32"
) -> SingleProcess:
    """Gradients and optimizer state in parts; parameters are put together once an update."""
    return _sharded(model, mesh, match, parameters, gradients, keeps_parameters=True)


def _sharded(
    model: nn.Module, mesh: Mesh, match: Sequence[str], parameters: str, gradients: str, keeps_parameters: bool
) -> SingleProcess:
    from paceline.engine.sharded import Sharded  # takes a while to import

    return Sharded(model, mesh, _blocks(model, match), _DTYPES[parameters], _DTYPES[gradients], keeps_parameters)


def _blocks(model: nn.Module, match: Sequence[str]) -> list[list[nn.Module]]:
    """What is put together at a time; a model without blocks is put together as a whole."""
    try:
        return [block.modules() for block in find_blocks(model, match)]
    except ValueError:
        if match:
            raise
        return []
