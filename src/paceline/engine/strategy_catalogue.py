"""The names of strategies: how a model is shared among processes."""

from __future__ import annotations

from typing import Literal

from paceline.core.arguments import Arguments, Positive
from paceline.core.registry import register

strategies = register.kind("strategy")


class DdpArguments(Arguments):
    """Arguments of `ddp`."""

    static_graph: bool = False
    """Promises that every pass uses the same parameters in the same way, which saves some work."""
    find_unused: bool = False
    """Looks for parameters that a pass does not use; needed where there are any, and costly."""
    bucket_mb: Positive = 25.0
    """How much is exchanged at a time."""
    compression: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """The form in which gradients travel; anything but none loses digits."""


class ShardedArguments(Arguments):
    """Arguments of `fsdp` and `zero`."""

    match: list[str] = []
    """Patterns of the modules that are put together one at a time; none: found from the model's structure."""
    parameters: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The form in which parameters travel and blocks compute."""
    gradients: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The form in which gradients travel."""


strategies.add("auto", "paceline.engine.strategies:single", summary="ddp with several processes, else single")
strategies.add("single", "paceline.engine.strategies:single", summary="one process")
strategies.add("dp", "paceline.engine.strategies:data_parallel", summary="one process, several devices")
strategies.add("ddp", "paceline.engine.strategies:ddp", DdpArguments, "a replica in every process")
strategies.add("fsdp", "paceline.engine.strategies:fsdp", ShardedArguments, "everything in parts (FSDP2)")
strategies.add(
    "zero", "paceline.engine.strategies:zero", ShardedArguments, "parts, put together once an update (ZeRO-2)"
)
