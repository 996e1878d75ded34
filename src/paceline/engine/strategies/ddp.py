"""How a model is shared among processes: not at all, or as replicas that exchange their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from paceline.checkpoint.shards import Part
from paceline.core.errors import TrainingError
from paceline.core.text import pluralize
from paceline.core.world import World
from paceline.data.loader import MicroBatch, Passes, StepBatch
from paceline.engine.stateful import Parts, share_state, unchanged_buffers, unchanged_state

_SETTLING_PASSES = 2
Compression = Literal["none", "bf16", "fp16", "powersgd"]


class SingleStrategy:
    """One process holds the whole model; there is nothing to exchange. Other strategies change what differs."""

    name = "single"
    passes: Passes = "own"
    factor = 1.0
    """What gradients are multiplied by, where the exchange divides them again."""
    can_probe = True
    """Whether one process could do the whole step alone."""
    norm_across: Callable[[Tensor], Tensor] | None = None
    """Makes the norm of the gradient that this process holds that of the whole; None where it holds the whole."""

    parts: Parts = MappingProxyType({})
    """The losses and the task, as far as they remember something; the run brings them."""

    def __init__(self, model: nn.Module, network: nn.Module | None = None) -> None:
        self.model = model
        self.network = network or model
        """What forward passes of training go through."""

    def accumulate(self, micro: MicroBatch, is_last: bool) -> AbstractContextManager[None]:
        """Surrounds the passes of a micro-batch; gradients are exchanged with the last."""
        return self.unchanged() if micro.is_padding else nullcontext()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Surrounds passes that do not count: buffers, and what losses remember, are afterwards what they were."""
        with unchanged_buffers(self.model), unchanged_state(self.parts):
            yield

    def preview(self) -> AbstractContextManager[None]:
        """Surrounds one of the passes, none of which counts, that come before those of a step."""
        return nullcontext()

    def sync_gradients(self, step_batch: StepBatch) -> None:
        """After the last micro-batch: have every process hold the gradient of the whole step."""

    def local(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The parameters with that part of their gradients that this process holds."""
        return parameters

    def warm_up(self, discarded_pass: Callable[[], None]) -> None:
        """Before a step: whatever must have happened once before gradients count."""

    def alone(self) -> AbstractContextManager[None]:
        """Surrounds passes of this process that no other takes part in."""
        return nullcontext()

    def rewrap(self) -> None:
        """Some parameters begin to learn."""

    def share_buffers(self) -> None:
        """Have every process hold the same buffers, before they are used or saved."""

    def reshard(self) -> None:
        """After passes without a backward one: let go of what was put together for them."""

    def whole(self, tensor: Tensor) -> Tensor:
        """A parameter, or what is shaped like one, all of it; every process asks for it at the same time."""
        return tensor

    def part(self, tensor: Tensor) -> Tensor | Part:
        """What this process writes of it into a checkpoint."""
        return tensor

    def place(self, tensor: Tensor, like: Tensor) -> Tensor:
        """The reverse: what this process keeps of it, where `like` is kept."""
        return tensor

    def describe(self) -> str:
        """One line for the start of a run."""
        return "one process"


class DataParallelStrategy(SingleStrategy):
    """One process, several devices: each gets a part of every micro-batch, the first one also gathers."""

    name = "dp"

    def __init__(self, model: nn.Module, devices: list[int]) -> None:
        super().__init__(model, nn.DataParallel(model, devices) if devices else model)
        self._devices = devices

    def describe(self) -> str:
        """One line for the start of a run."""
        where = f"devices {', '.join(map(str, self._devices))}" if self._devices else "no devices, so as one process"
        return f"dp: one process on {where}; weights and outputs pass through the first device; ddp is faster"


class DDPStrategy(SingleStrategy):
    """Every process holds the whole model; torch's DistributedDataParallel adds up gradients while they are made."""

    name = "ddp"
    passes: Passes = "some"

    def __init__(
        self,
        model: nn.Module,
        world: World,
        is_exact: bool = True,
        static_graph: bool = False,
        find_unused: bool = False,
        bucket_mb: float = 25.0,
        compression: Compression = "none",
    ) -> None:
        super().__init__(model)
        self.factor = float(world.size)  # the reducer takes the mean over processes
        self._world = world
        self._compression = compression
        self._options: dict[str, Any] = {
            "static_graph": static_graph,
            "find_unused_parameters": find_unused,
            "bucket_cap_mb": bucket_mb,
        }
        # The sum of two numbers has no order: what buckets they travel in shows with a third process only.
        # A static graph is learned from a pass that exchanges gradients, and the first of a step may not.
        self._settles = static_graph or (is_exact and world.size > 2)
        self._buffers = [buffer for module in model.modules() for buffer in module.buffers(recurse=False)]
        self._read_in_training = [
            buffer
            for module in model.modules()
            if not isinstance(module, _BatchNorm)
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        self.rewrap()

    def rewrap(self) -> None:
        """Wrap the model anew, since the reducer only knows the parameters that learned when it was made."""
        device = [self._world.device.index] if self._world.device.type == "cuda" else None
        self.network = DistributedDataParallel(
            self.model, device, forward_sync_buffers=False, gradient_as_bucket_view=True, **self._options
        )
        _compress(self.network, self._compression)
        self._is_settled = not self._settles
        self._known = parameter_ids(self.model)

    @contextmanager
    def accumulate(self, micro: MicroBatch, is_last: bool) -> Iterator[None]:
        """Surrounds the passes of a micro-batch; gradients are exchanged with the last."""
        assert isinstance(self.network, DistributedDataParallel)
        with ExitStack() as stack:
            if not is_last:
                stack.enter_context(self.network.no_sync())
            if micro.is_padding:
                stack.enter_context(self.unchanged())
            yield

    def alone(self) -> AbstractContextManager[None]:
        """Surrounds passes of this process that no other takes part in."""
        assert isinstance(self.network, DistributedDataParallel)
        return self.network.no_sync()

    def sync_gradients(self, step_batch: StepBatch) -> None:
        """Gradients are exchanged by now; see that the reducer knew all of them."""
        refuse_changed_parameters(parameter_ids(self.model), self._known)
        if self._read_in_training:
            self._broadcast(self._read_in_training)
        share_state(self.parts, self._world)

    def warm_up(self, discarded_pass: Callable[[], None]) -> None:
        """The reducer arranges its buckets anew after the first pass, which changes the order of sums: do it now."""
        if self._is_settled:
            return
        with self.unchanged():
            for _ in range(_SETTLING_PASSES):
                discarded_pass()
        for parameter in self.model.parameters():
            parameter.grad = None
        self._is_settled = True

    def share_buffers(self) -> None:
        """BatchNorm's running statistics are those of the first process, as everywhere in torch."""
        self._broadcast(self._buffers)

    def describe(self) -> str:
        """One line for the start of a run."""
        compressed = "" if self._compression == "none" else f", gradients travel as {self._compression}"
        return f"ddp: {pluralize(self._world.size, 'process')}, each with the whole model{compressed}"

    def _broadcast(self, buffers: list[Tensor]) -> None:
        with torch.no_grad():
            for group in _by_type(buffers):
                flat = torch.cat([buffer.reshape(-1) for buffer in group])
                dist.broadcast(flat, 0)
                for buffer, value in zip(group, torch.split(flat, [each.numel() for each in group]), strict=True):
                    buffer.copy_(value.view_as(buffer))


def parameter_ids(model: nn.Module) -> list[int]:
    """What tells whether a model still has the parameters that it had."""
    return [id(parameter) for module in model.modules() for parameter in module._parameters.values()]


def refuse_changed_parameters(found: object, known: object) -> None:
    """Raise TrainingError unless what describes a model's parameters is the same as when the run began."""
    if found != known:
        raise TrainingError(
            "the model's parameters are not those that it had when the run began: parameters that are added, removed or"
            " replaced during training would not be exchanged among processes; make all of them when the model is built"
        )


def _by_type(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _compress(network: DistributedDataParallel, compression: Compression) -> None:
    if compression == "none":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hook: Any
    state: Any = None
    if compression == "powersgd":
        state, hook = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10), powerSGD_hook.powerSGD_hook
    else:
        hook = default_hooks.bf16_compress_hook if compression == "bf16" else default_hooks.fp16_compress_hook
    network.register_comm_hook(state, hook)
