"""Activation checkpointing: blocks of a model recompute their activations in the backward pass instead of keeping them.

Gradients and buffers are bit-identical to those without it, dropout included. In evaluation and without gradients a
block runs as it is. A SyncBatchNorm inside a block exchanges its statistics a second time, on all ranks in the same
order. What a block does beside its outputs and buffers, such as counting in a Python attribute, is done twice.

Apply it before the model is wrapped or compiled, and before `fully_shard`. Under `torch.compile` the compiler decides
itself what to keep of a checkpointed block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.core.arguments import Count
from paceline.core.registry import register
from paceline.core.torch_private import tree_leaves, tree_map, version_of
from paceline.engine.activation_checkpointing.blocks import Block, best_number, find_blocks, join_neighbors
from paceline.engine.stateful import buffers_of
from paceline.models.norm import STATISTICS_NORMS


@register.activation_checkpointing("none")
@dataclass(frozen=True)
class NoActivationCheckpointing:
    """Everything is kept."""

    def apply(self, model: nn.Module) -> list[str]:
        return []


@register.activation_checkpointing("blocks")
@dataclass(frozen=True)
class Blocks:
    """Checkpoints every block, or every n-th, beginning with the first.

    Blocks are found from the model's structure, or are the modules that the patterns of `match` name. Without either,
    neighboring blocks that hold little inside go together, so that fewer inputs are kept between them.
    """

    every: Annotated[Count, Field(description="2: every second block, beginning with the first.")] = 1
    match: Annotated[
        Sequence[str],
        Field(description="Patterns of the modules to recompute; empty: found from the model's structure."),
    ] = ()

    def apply(self, model: nn.Module) -> list[str]:
        """Have the blocks recompute their activations in the backward pass; returns their names."""
        blocks = find_blocks(model, self.match)
        if self.match or self.every > 1:
            blocks = blocks[:: self.every]
        else:
            blocks = join_neighbors(model, blocks, best_number(blocks))
        for block in blocks:
            checkpoint_block(block)
        return [block.name for block in blocks]


class CheckpointedModule(nn.Module):
    """A base class that is put before a module's own: the whole module is checkpointed."""

    is_checkpointed = True
    _block_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain = super().forward
        if not _is_needed(self):
            return plain(*args, **kwargs)
        return _call_checkpointed(plain, [self], self._block_name, args, kwargs)


class CheckpointedRuns(nn.Sequential):
    """A base class that is put before a sequence's own: runs of its children are checkpointed, each as one piece."""

    is_checkpointed = True
    _runs: dict[str, tuple[str, tuple[str, ...]]]
    """The name of the run that begins with a child, and its children."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - as in torch
        runs = self.__dict__.get("_runs", {})  # a slice of the sequence has none
        if not runs or not _is_needed(self):
            return super().forward(input)  # type: ignore[no-untyped-call]
        in_runs = {child for _, children in runs.values() for child in children}
        for key, child in self._modules.items():
            if key in runs:
                name, children = runs[key]
                members = [self.get_submodule(each) for each in children]
                input = _call_checkpointed(partial(_in_turn, members), members, name, (input,), {})  # noqa: A001
            elif key not in in_runs:
                input = child(input)  # noqa: A001
        return input


def checkpoint_block(block: Block) -> None:
    """Have every backward pass recompute the block."""
    first = next(each for each in block.modules()[0].modules() if not list(each.children()))
    if getattr(first, "inplace", False) is True:
        first.inplace = False  # type: ignore[assignment] # else it changes the block's input; the numbers are the same
    owner: Any = block.owner
    kind: type[nn.Module] = CheckpointedRuns if block.children else CheckpointedModule
    if not isinstance(owner, kind):
        owner.__class__ = _under(kind, type(owner))
    if block.children:
        owner._runs = {**owner.__dict__.get("_runs", {}), block.children[0]: (block.name, block.children)}
    else:
        owner._block_name = block.name


_made: dict[tuple[type, type], type[nn.Module]] = {}


def _under(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """The class `own` with `kind` before it, under its own name; the same one each time."""
    if (kind, own) not in _made:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        _made[kind, own] = type(own.__name__, (kind, own), names)
    return _made[kind, own]


def _call_checkpointed(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if torch.compiler.is_compiling():  # the compiler sets buffers once, whatever it computes twice
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    buffers = KeptBuffers(modules)
    # Lists and dicts are copied: their owner may put more into them before the backward pass.
    args, kwargs = tree_map(lambda each: each, (args, kwargs))
    inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    versions = [version_of(each) for each in inputs]
    outputs = checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), buffers), **kwargs)
    if versions != [version_of(each) for each in inputs]:
        raise ValueError(
            f"checkpointing: {name} changes its input in place, so it cannot be recomputed from it;"
            " leave it out by naming other modules with match, or make its first operation not in place"
        )
    return outputs


def _in_turn(members: Sequence[nn.Module], value: Any) -> Any:
    for member in members:
        value = member(value)
    return value


def _is_needed(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


_KNOWN_LIBRARIES = ("torch", "timm", "torchvision")


class KeptBuffers:
    """The current buffers of some modules, before a pass that will be repeated.

    A buffer that the pass changes (the vector of spectral norm, a counter) is for the second pass what it was for the
    first, and after it what it has become since. Statistics of norm layers are not wound back for it: in training they
    have no part in the outputs. The second pass runs inside it as a context.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = [each for module in modules for each in module.modules() if each._buffers]
        self._norms = [each for each in owners if _only_tracks(each)]
        others = [each for each in owners if not _only_tracks(each)]
        self._before = [(buffers, name, buffer.clone()) for buffers, name, buffer in buffers_of(others)]
        self._now: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []

    def __enter__(self) -> None:
        """Before a second pass: it gets copies, so that neither buffers nor tensors held by a graph change."""
        given = [*buffers_of(norm for norm in self._norms if norm.training), *self._before]
        self._now = [(buffers, name, buffers[name]) for buffers, name, _ in given]
        for buffers, name, value in given:
            buffers[name] = value.clone()

    def __exit__(self, *error: object) -> None:
        for buffers, name, buffer in self._now:
            buffers[name] = buffer
        self._now = []


def _only_tracks(module: nn.Module) -> bool:
    # A user's own norm layer may do more with its buffers than to track statistics.
    return isinstance(module, STATISTICS_NORMS) and type(module).__module__.partition(".")[0] in _KNOWN_LIBRARIES
