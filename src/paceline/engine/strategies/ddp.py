"""DDP: every rank holds the whole model, and torch's DistributedDataParallel all-reduces the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Annotated, Any

from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.arguments import Positive
from paceline.core.errors import TrainingError
from paceline.core.registry import register
from paceline.core.text import join_first, pluralize
from paceline.core.torch_private import saved_buffers
from paceline.core.world import World
from paceline.data.loader import MicroBatch, Passes, StepBatch
from paceline.engine.stateful import share_state
from paceline.engine.strategies.single import SingleStrategy, broadcast_all, parameter_ids, refuse_changed_parameters
from paceline.models.norm import BATCH_NORMS

_WARM_UP_PASSES = 2
# torch 2.13 has deprecated the other name, which older versions alone know.
_KNOWS_FORWARD = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _KNOWS_FORWARD else "broadcast_buffers"


class DDPStrategy(SingleStrategy):
    """Every rank holds the whole model; gradients are all-reduced during the backward pass."""

    name = "ddp"
    passes: Passes = "at_least_one"

    def __init__(
        self,
        model: nn.Module,
        world: World,
        is_exact: bool = True,
        static_graph: bool = False,
        find_unused: bool = False,
        bucket_mb: float = 25.0,
    ) -> None:
        super().__init__(model)
        self.grad_divisor = float(world.size)  # the reducer takes the mean over processes
        self._world = world
        self._options: dict[str, Any] = {
            _SYNC_BUFFERS: False,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused,
            "bucket_cap_mb": bucket_mb,
        }
        # The sum of two numbers has no order: what buckets they travel in shows with a third process only.
        # A static graph is learned from a pass that exchanges gradients, and the first of a step may not.
        self._needs_warm_up = static_graph or (is_exact and world.size > 2)
        self._read_in_training = [
            buffer
            for module in model.modules()
            if not isinstance(module, BATCH_NORMS)
            for name, buffer in module.named_buffers(recurse=False)
            if name in saved_buffers(module)
        ]
        self.rewrap()

    def rewrap(self) -> None:
        """Wrap the model again, since the reducer only knows the parameters that learned when it was made."""
        device = [self._world.device.index] if self._world.device.type == "cuda" else None
        self.network = DistributedDataParallel(self.model, device, gradient_as_bucket_view=True, **self._options)
        self._is_warm = not self._needs_warm_up
        self._known = parameter_ids(self.model)
        trainable = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
        self._expected = [] if self._options["static_graph"] or self._options["find_unused_parameters"] else trainable
        """Parameters without whose gradients the reducer does not finish."""

    @contextmanager
    def accumulate(self, micro: MicroBatch, is_last: bool) -> Iterator[None]:
        """A context for the passes of a micro-batch; gradients are all-reduced with the last one."""
        with nullcontext() if is_last else self.alone(), super().accumulate(micro, is_last):
            yield

    def alone(self) -> AbstractContextManager[None]:
        assert isinstance(self.network, DistributedDataParallel)
        return self.network.no_sync()

    def after_backward(self, step_batch: StepBatch) -> None:
        """Gradients are all-reduced by now: check that the reducer got all; share buffers and losses' state."""
        refuse_changed_parameters(parameter_ids(self.model), self._known)
        self._refuse_unused()
        broadcast_all(self._read_in_training)
        share_state(self.parts, self._world)

    def warm_up(self, discarded_pass: Callable[[], None]) -> None:
        """The reducer rebuilds its buckets after the first pass, which changes the order of sums: do it now."""
        if self._is_warm:
            return
        with self.unchanged():
            for _ in range(_WARM_UP_PASSES):
                discarded_pass()
                self._refuse_unused()
        for parameter in self.model.parameters():
            parameter.grad = None
        self._is_warm = True

    def share_buffers(self) -> None:
        broadcast_all(self.model.buffers())

    def describe(self) -> str:
        return f"ddp: {pluralize(self._world.size, 'process')}, each with the whole model"

    def _refuse_unused(self) -> None:
        if unused := [name for name, parameter in self._expected if parameter.grad is None]:
            raise TrainingError(
                f"strategy ddp: the loss does not depend on {join_first(unused, 3)}, whose gradients it waits for;"
                " freeze these parameters (model.freeze), or set train.strategy={name: ddp, find_unused: true}"
            )


@register.strategy("auto")
def auto(model: nn.Module, world: World, is_exact: bool = True) -> SingleStrategy:
    """`ddp` with several processes, else `single`."""
    return ddp(model, world, is_exact)


@register.strategy("ddp")
def ddp(
    model: nn.Module,
    world: World,
    is_exact: bool = True,
    static_graph: Annotated[
        bool,
        Field(description="Promises that every pass uses the same parameters in the same way, which saves some work."),
    ] = False,
    find_unused: Annotated[
        bool,
        Field(description="Looks for parameters that a pass does not use; needed where there are any, and costly."),
    ] = False,
    bucket_mb: Annotated[Positive, Field(description="How much is reduced at a time.")] = 25.0,
) -> SingleStrategy:
    """A replica on every rank; with one process, `single`."""
    if world.size == 1:
        return SingleStrategy(model)
    return DDPStrategy(model, world, is_exact, static_graph, find_unused, bucket_mb)
