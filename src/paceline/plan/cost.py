"""How long a step takes on a device, estimated from the operations and the bytes of each of its operators.

And what the processes of a run send one another in a step, and how long that takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry

from paceline.core.torch_private import TorchDispatchMode, tree_leaves
from paceline.plan.devices import Speed
from paceline.recipe.schema import Train

# Chosen from a grid to fit the training speeds of ResNet-50 that NVIDIA publishes for A100 and V100 (938 images a
# second in TF32, 367 in FP32, 2470 and 1200 in mixed precision), which they meet within 25 %.
COMPUTE_EFFICIENCY = 0.7
"""The share of its stated operations a second that a device is assumed to reach in convolutions and matrix products."""
BANDWIDTH_EFFICIENCY = 0.5
"""The share of its stated bandwidth that a device is assumed to reach."""
LAUNCH_SECONDS = 5e-6
"""What an operator is assumed to take at least: the host has to start it."""
DEVICES_OF_A_MACHINE = 8
"""The most processes that are taken to share one machine, its cores and the links between its devices."""
NETWORK = 50e9
"""Bytes a second, in each direction, that are assumed between machines: 400 Gbit/s."""
LINK_EFFICIENCY = 0.7
"""The share of its stated bandwidth that a link is assumed to reach."""
_HALF = ("bf16", "fp16")
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class OperatorCost(NamedTuple):
    """What one call of an operator computes and moves."""

    flops: int
    bytes: int
    precision: str


@dataclass
class StepCost:
    """The operators of a step's passes and of its update of the weights, and how often each is called."""

    passes: Counter[OperatorCost] = field(default_factory=Counter)
    update: Counter[OperatorCost] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        """Floating-point operations of all convolutions, matrix products and attention."""
        return sum(cost.flops * number for cost, number in (self.passes + self.update).items())

    @property
    def bytes(self) -> int:
        """What operators read and write."""
        return sum(cost.bytes * number for cost, number in (self.passes + self.update).items())

    def repeated(self, number: float) -> StepCost:
        """The cost of a step with `number` times as many passes."""
        more = Counter({cost: round(calls * number) for cost, calls in self.passes.items()})
        return StepCost(more, self.update)

    def seconds(self, speed: Speed, is_tf32: bool = False) -> float:
        """How long a device takes, if it reaches the assumed efficiency and computes one operator after the other."""
        total = 0.0
        for cost, number in (self.passes + self.update).items():
            precision = "tf32" if is_tf32 and cost.precision == "fp32" else cost.precision
            computing = cost.flops / (COMPUTE_EFFICIENCY * speed.flops[precision])
            moving = cost.bytes / (BANDWIDTH_EFFICIENCY * speed.bandwidth)
            total += number * max(computing, moving, LAUNCH_SECONDS)
        return total


class CostCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what the operators of a step compute and move, on fake tensors as on real ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = StepCost()
        self._calls = self.cost.passes

    @contextmanager
    def count(self, optimizer: Optimizer) -> Iterator[StepCost]:
        """Surrounds a step; what its optimizer does is counted apart from its passes."""
        handles = [
            optimizer.register_step_pre_hook(lambda *_: self._count_as(self.cost.update)),
            optimizer.register_step_post_hook(lambda *_: self._count_as(self.cost.passes)),
        ]
        try:
            with self:
                yield self.cost
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it, unless it only looks at a tensor in another way."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func.is_view or func.namespace != "aten" or "empty" in func.name():
            return made
        taken, given = _tensors((args, kwargs)), _tensors(made)
        if not taken and not given:
            return made
        formula = flop_registry.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=made) if formula else 0
        moved = sum(tensor.nbytes for tensor in (*taken, *(given or taken)))  # what gives nothing writes what it takes
        precision = _PRECISIONS.get((taken or given)[0].dtype, "fp32")
        self._calls[OperatorCost(flops, moved, precision)] += 1
        return made

    def _count_as(self, calls: Counter[OperatorCost]) -> None:
        self._calls = calls


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def sent_bytes(train: Train, model: nn.Module, processes: int, micro_batches: int) -> int | None:
    """What each process sends in a step; None if the strategy's ways are not known.

    In a ring, whoever gathers or reduces n parts sends n − 1 of them. To sum gradients for all is to do both.
    """
    if processes == 1:
        return 0
    strategy, options = train.strategy.name, train.strategy.model_extra or {}
    parameters = list(model.parameters())
    gathered = sum(_size(each, options.get("parameters")) for each in parameters)
    learning = [each for each in parameters if each.requires_grad]
    reduced = sum(_size(each, options.get("gradients")) for each in learning)
    if strategy in ("auto", "ddp") and train.reproducible != "world":
        total = 2 * reduced
    elif strategy == "fsdp":
        total = 2 * micro_batches * gathered + reduced  # for each forward and each backward pass
    elif strategy == "zero":
        total = gathered + reduced
    else:
        return None
    return round(total * (processes - 1) / processes)


def communication_seconds(sent: int, processes: int, speed: Speed) -> float | None:
    """How long the slowest link takes for what a process sends; None if nothing is known of it."""
    if speed.link is None:
        return None
    slowest = speed.link if processes <= DEVICES_OF_A_MACHINE else min(speed.link, NETWORK)
    return sent / (LINK_EFFICIENCY * slowest)


def _size(parameter: nn.Parameter, travels_as: object) -> int:
    return parameter.numel() * (2 if travels_as in _HALF else parameter.element_size())
