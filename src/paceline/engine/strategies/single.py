"""One process holds the whole model: the interface of a strategy, and its base class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch import distributed as dist

from paceline.checkpoint.shards import TensorShard
from paceline.core.errors import TrainingError
from paceline.core.registry import register
from paceline.core.world import World
from paceline.data.loader import MicroBatch, Passes, StepBatch
from paceline.engine.stateful import KeptState, Parts


class SingleStrategy:
    """One process holds the whole model. Other strategies override what differs."""

    name = "single"
    passes: Passes = "own"
    grad_divisor = 1.0
    """What the exchange divides gradients by; losses are multiplied by it first."""
    norm_across: Callable[[Tensor], Tensor] | None = None
    """Makes the norm of the gradient that this process holds that of the whole; None where it holds the whole."""

    parts: Parts = MappingProxyType({})
    """The losses and the task, as far as they remember something; the run brings them."""

    def __init__(self, model: nn.Module, network: nn.Module | None = None) -> None:
        self.model = model
        self.network = network or model
        """What forward passes of training go through."""

    def accumulate(self, micro: MicroBatch, is_last: bool) -> AbstractContextManager[None]:
        """A context for the passes of a micro-batch; strategies that exchange gradients do so in the last one."""
        return self.unchanged() if micro.is_padding else nullcontext()

    def unchanged(self) -> AbstractContextManager[None]:
        """A context for passes that do not count: buffers and the state of losses are restored."""
        return KeptState(self.model.modules(), self.parts)

    def preview(self) -> AbstractContextManager[None]:
        """A context for a pass before those of a step, which does not count."""
        return nullcontext()

    def after_backward(self, step_batch: StepBatch) -> None:
        """After the last backward pass: every rank has the gradient of the whole step afterwards."""

    def local(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The parameters with the part of their gradients that this rank holds."""
        return parameters

    def warm_up(self, discarded_pass: Callable[[], None]) -> None:
        """Before the first step: run passes that the strategy needs once."""

    def alone(self) -> AbstractContextManager[None]:
        """A context for passes of this rank alone."""
        return nullcontext()

    def rewrap(self) -> None:
        """Adapt to parameters that were unfrozen."""

    def share_buffers(self) -> None:
        """Give every rank the same buffers, before they are used or saved."""

    def reshard(self) -> None:
        """After forward passes without backward: free gathered parameters."""

    def whole(self, tensor: Tensor) -> Tensor:
        """The full tensor of a parameter, or of one shaped like it; all ranks must call it together."""
        return tensor

    def part(self, tensor: Tensor) -> Tensor | TensorShard:
        """The part of a tensor that this rank writes into a checkpoint."""
        return tensor

    def place(self, tensor: Tensor, like: Tensor) -> Tensor:
        """The part of a full tensor that this rank keeps, on the device of `like`."""
        return tensor

    def describe(self) -> str:
        """One line for the start of a run."""
        return "one process"


class DataParallelStrategy(SingleStrategy):
    """One process, several devices: each gets a part of every micro-batch, and the first one gathers."""

    name = "dp"

    def __init__(self, model: nn.Module, devices: list[int]) -> None:
        super().__init__(model, nn.DataParallel(model, devices) if devices else model)
        self._devices = devices

    def describe(self) -> str:
        if not self._devices:
            return "dp: one process, and no device to share its batches with"
        where = ", ".join(map(str, self._devices))
        return f"dp: one process on devices {where}; weights and outputs pass through the first device; ddp is faster"


@register.strategy("single")
def single(model: nn.Module) -> SingleStrategy:
    """One process holds the whole model."""
    return SingleStrategy(model)


@register.strategy("dp")
def data_parallel(model: nn.Module, world: World) -> DataParallelStrategy:
    """One process, several devices."""
    is_cuda = world.device.type == "cuda"
    return DataParallelStrategy(model, list(range(torch.cuda.device_count())) if is_cuda else [])


def broadcast_all(tensors: Iterable[Tensor]) -> None:
    """Give every rank the values of rank 0."""
    for tensor in tensors:
        dist.broadcast(tensor, 0)


def parameter_ids(model: nn.Module) -> list[int]:
    """The identity of a model's parameters, to notice replaced ones."""
    return [id(parameter) for module in model.modules() for parameter in module._parameters.values()]


def refuse_changed_parameters(found: object, known: object) -> None:
    """Raise TrainingError if the model's parameters were replaced since the run started."""
    if found != known:
        raise TrainingError(
            "the model's parameters are not those that it had when the run began: parameters that are added, removed or"
            " replaced during training would not be exchanged among processes; make all of them when the model is built"
        )
