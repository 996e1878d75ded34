"""One process holds the whole model: what a run asks of its strategy, and the plainest answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType

from torch import Tensor, nn

from paceline.checkpoint.shards import TensorShard
from paceline.core.errors import TrainingError
from paceline.core.registry import register
from paceline.data.loader import MicroBatch, Passes, StepBatch
from paceline.engine.stateful import Parts, unchanged_buffers, unchanged_state


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

    def part(self, tensor: Tensor) -> Tensor | TensorShard:
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


@register.strategy("single")
def single(model: nn.Module) -> SingleStrategy:
    """One process holds the whole model."""
    return SingleStrategy(model)


@register.strategy("dp")
def data_parallel(model: nn.Module, devices: list[int]) -> DataParallelStrategy:
    """One process, several devices."""
    return DataParallelStrategy(model, devices)


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
