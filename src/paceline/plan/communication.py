"""What the processes of a run send one another in a step, and how long that takes."""

from __future__ import annotations

from torch import nn

from paceline.plan.devices import Speed
from paceline.recipe.schema import Train

DEVICES_OF_A_MACHINE = 8
"""The most processes that are taken to share one machine, its cores and the links between its devices."""
NETWORK = 50e9
"""Bytes a second, in each direction, that are assumed between machines: 400 Gbit/s."""
LINK_EFFICIENCY = 0.7
"""The share of its stated bandwidth that a link is assumed to reach."""
_HALF = ("bf16", "fp16")


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
