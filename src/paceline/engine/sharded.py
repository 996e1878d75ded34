"""A model cut among processes: each keeps its part of every parameter, gradient and optimizer state (torch's FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from paceline.checkpoint.shards import Part
from paceline.core.counting import counted
from paceline.core.mesh import Mesh
from paceline.data.loading.loader import MicroBatch, Passes, Update
from paceline.engine.objective import unchanged_buffers
from paceline.engine.parallel import SingleProcess, refuse_changed_parameters


class _Part(NamedTuple):
    grad: Tensor


class Sharded(SingleProcess):
    """Every process keeps its part; parameters are put together for the passes of a block and let go afterwards.

    With `keeps_parameters` they are put together once an update and let go after its last backward pass, as in
    ZeRO's second stage: more memory during an update, less traffic.
    """

    passes: Passes = "even"
    can_probe = False

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        blocks: Sequence[list[nn.Module]],
        parameter_dtype: torch.dtype = torch.float32,
        gradient_dtype: torch.dtype = torch.float32,
        keeps_parameters: bool = False,
    ) -> None:
        _join_alone(mesh)
        self.name = "zero" if keeps_parameters else "fsdp"
        self.factor = float(mesh.world)  # gradients are averaged over processes
        self._mesh = mesh
        self._blocks = len(blocks)
        devices = init_device_mesh(mesh.device.type, (mesh.world,))
        policy = MixedPrecisionPolicy()
        if (parameter_dtype, gradient_dtype) != (torch.float32, torch.float32):
            policy = MixedPrecisionPolicy(parameter_dtype, gradient_dtype, output_dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # all that can be cut; images alone choose channels_last
        for block in blocks:
            fully_shard(block, mesh=devices, mp_policy=policy, reshard_after_forward=not keeps_parameters)
        fully_shard(model, mesh=devices, mp_policy=policy, reshard_after_forward=False)
        super().__init__(model)
        self._known = _kept_in_parts(model)

    @contextmanager
    def accumulate(self, micro: MicroBatch, is_last: bool) -> Iterator[None]:
        """Surrounds the passes of a micro-batch; gradients are exchanged with the last."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(is_last)
        self.model.set_is_last_backward(is_last)
        with ExitStack() as stack:
            if micro.is_ghost:
                stack.enter_context(unchanged_buffers(self.model))
            yield

    def exchange(self, update: Update) -> None:
        """Gradients are exchanged by now; see that none was left out."""
        refuse_changed_parameters(_kept_in_parts(self.model), self._known)

    def norm_across(self, norm: Tensor) -> Tensor:
        """The norm of the whole gradient from that of this process's part."""
        return self._mesh.sum(norm.square()).sqrt()

    def local(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """What has this process's parts as its gradients."""
        return [cast(nn.Parameter, _Part(each.grad.to_local())) for each in parameters if each.grad is not None]  # type: ignore[attr-defined]

    def share_buffers(self) -> None:
        """BatchNorm's running statistics are those of the first process."""
        if self._mesh.world > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)

    def release(self) -> None:
        """Keep the parts alone: what is put together would not follow when parts change, as to an average."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor that is kept in parts; every process asks for it at the same time."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: Tensor) -> Tensor | Part:
        """This process's rows of a tensor that is kept in parts."""
        if not isinstance(tensor, DTensor):
            return tensor
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local = tensor.to_local()
        return Part(local, tuple(tensor.shape), offset[0] if len(local) else 0)

    def place(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This process's part of a tensor that every process has all of."""
        if not isinstance(like, DTensor) or tensor.shape != like.shape:
            return tensor
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    def describe(self) -> str:
        """One line for the start of a run."""
        parts = f"parameters and optimizer state in parts, {counted(self._blocks, 'block')}"
        if self._mesh.world == 1:
            return f"{self.name}: {parts}; note: one process saves no memory by it"
        return f"{self.name}: {self._mesh.world} processes, {parts}"


def _kept_in_parts(model: nn.Module) -> dict[str, bool]:
    """Of each parameter whether every process keeps its part of it, and so exchanges its gradient."""
    return {name: isinstance(parameter, DTensor) for name, parameter in model.named_parameters()}


def _join_alone(mesh: Mesh) -> None:
    """A world of one has no process group, which sharding wants all the same."""
    if not dist.is_initialized():
        dist.init_process_group(mesh.backend, store=HashStore(), rank=0, world_size=1)
