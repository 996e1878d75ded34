"""FSDP: each rank keeps a shard of every parameter, gradient and optimizer state (torch's FSDP2)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.checkpoint.shards import TensorShard
from paceline.core.registry import register
from paceline.core.text import pluralize
from paceline.core.world import World
from paceline.data.loader import MicroBatch, Passes, StepBatch
from paceline.engine.activation_checkpointing.blocks import find_blocks
from paceline.engine.stateful import share_state
from paceline.engine.strategies.single import SingleStrategy, broadcast_all, refuse_changed_parameters
from paceline.models.norm import STATISTICS_NORMS

Patterns = Annotated[
    Sequence[str],
    Field(description="Patterns of the modules that are gathered one at a time; empty: found from the structure."),
]
_Type = Literal["fp32", "bf16", "fp16"]
ParameterType = Annotated[_Type, Field(description="The type in which parameters travel and blocks compute.")]
GradientType = Annotated[_Type, Field(description="The type in which gradients travel.")]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _Part(NamedTuple):
    grad: Tensor


class FSDPStrategy(SingleStrategy):
    """Every rank keeps its shard; the parameters of a block are gathered for its passes and resharded after them.

    With `keeps_parameters` they are put together once a step and let go after its last backward pass, as in
    ZeRO's second stage: more memory during a step, less traffic.
    """

    passes: Passes = "equal"

    def __init__(
        self,
        model: nn.Module,
        world: World,
        blocks: Sequence[list[nn.Module]],
        parameter_dtype: torch.dtype = torch.float32,
        gradient_dtype: torch.dtype = torch.float32,
        keeps_parameters: bool = False,
    ) -> None:
        _join_alone(world)
        self.name = "zero" if keeps_parameters else "fsdp"
        self.grad_divisor = float(world.size)  # gradients are averaged over processes
        self._world = world
        self._blocks = len(blocks)
        devices = init_device_mesh(world.device.type, (world.size,))
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # all that can be cut; images alone choose channels_last
        reduced = None if gradient_dtype == torch.float32 else gradient_dtype
        plain = MixedPrecisionPolicy(reduce_dtype=reduced)
        inner, outer, norms = plain, plain, []
        if parameter_dtype != torch.float32:
            # The model's outputs alone become float32: what follows a block may have weights of its own.
            inner = replace(plain, param_dtype=parameter_dtype)
            outer = replace(inner, output_dtype=torch.float32)
            norms = _tracking_norms(model)
        for norm in norms:
            fully_shard(norm, mesh=devices, mp_policy=plain, reshard_after_forward=False)
        for block in blocks:
            rest = [module for module in block if module not in norms]
            fully_shard(rest, mesh=devices, mp_policy=inner, reshard_after_forward=not keeps_parameters)
        fully_shard(model, mesh=devices, mp_policy=outer, reshard_after_forward=False)
        if inspect.ismethod(getattr(model, "features", None)):  # a task calls it too, and needs whole parameters
            register_fsdp_forward_method(model, "features")
        super().__init__(model)
        self._known = _kept_in_parts(model)

    @contextmanager
    def accumulate(self, micro: MicroBatch, is_last: bool) -> Iterator[None]:
        """A context for the passes of a micro-batch; gradients are reduce-scattered in the last one."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(is_last)
        self.model.set_is_last_backward(is_last)
        with super().accumulate(micro, is_last):
            yield

    def after_backward(self, step_batch: StepBatch) -> None:
        """Gradients are reduced by now: check that none was missed, and share the state of losses."""
        refuse_changed_parameters(_kept_in_parts(self.model), self._known)
        share_state(self.parts, self._world)

    def norm_across(self, norm: Tensor) -> Tensor:
        """The norm of the full gradient from that of this rank's shard."""
        return self._world.sum(norm.square()).sqrt()

    def local(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        return [cast(nn.Parameter, _Part(each.grad.to_local())) for each in parameters if each.grad is not None]  # type: ignore[attr-defined]

    def share_buffers(self) -> None:
        if self._world.size > 1:
            broadcast_all(self.model.buffers())

    def reshard(self) -> None:
        """Free gathered parameters: they would be stale once shards change, as when an average is swapped in."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: Tensor) -> Tensor | TensorShard:
        if not isinstance(tensor, DTensor):
            return tensor
        local, devices = tensor.to_local(), tensor.device_mesh
        start = devices.get_local_rank() * -(-len(tensor) // devices.size())  # as `torch.chunk` divides the rows
        return TensorShard(local, tuple(tensor.shape), start if len(local) else 0)

    def place(self, tensor: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or tensor.shape != like.shape:
            return tensor
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    def describe(self) -> str:
        parts = f"parameters and optimizer state in parts, {pluralize(self._blocks, 'block')}"
        if self._world.size == 1:
            return f"{self.name}: {parts}; note: one process saves no memory by it"
        return f"{self.name}: {self._world.size} processes, {parts}"


@register.strategy("fsdp")
def fsdp(
    model: nn.Module,
    world: World,
    match: Patterns = (),
    parameters: ParameterType = "fp32",
    gradients: GradientType = "fp32",
) -> SingleStrategy:
    """Shards parameters, gradients and optimizer state; parameters are gathered block by block."""
    return _sharded(model, world, match, parameters, gradients, keeps_parameters=False)


@register.strategy("zero")
def zero(
    model: nn.Module,
    world: World,
    match: Patterns = (),
    parameters: ParameterType = "fp32",
    gradients: GradientType = "fp32",
) -> SingleStrategy:
    """Shards gradients and optimizer state; parameters are gathered once a step."""
    return _sharded(model, world, match, parameters, gradients, keeps_parameters=True)


def _sharded(
    model: nn.Module, world: World, match: Sequence[str], parameters: str, gradients: str, keeps_parameters: bool
) -> SingleStrategy:
    return FSDPStrategy(model, world, _blocks(model, match), _DTYPES[parameters], _DTYPES[gradients], keeps_parameters)


def _blocks(model: nn.Module, match: Sequence[str]) -> list[list[nn.Module]]:
    """The modules to gather one at a time; a model without blocks is gathered as a whole."""
    try:
        return [block.modules() for block in find_blocks(model, match)]
    except ValueError:
        if match:
            raise
        return []


def _tracking_norms(model: nn.Module) -> list[nn.Module]:
    """BatchNorm with weights: it keeps statistics in float32, beside which torch takes no weights of another type."""
    return [
        module
        for module in model.modules()
        if isinstance(module, STATISTICS_NORMS) and module.running_mean is not None and module.weight is not None
    ]


def _kept_in_parts(model: nn.Module) -> dict[str, bool]:
    """Whether each parameter is sharded, so that its gradient is reduced."""
    return {name: isinstance(parameter, DTensor) for name, parameter in model.named_parameters()}


def _join_alone(world: World) -> None:
    """Create a process group for a world of one, which sharding needs."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(world.backend, store=store, rank=0, world_size=1)
