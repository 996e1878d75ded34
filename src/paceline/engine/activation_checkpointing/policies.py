"""Activation checkpointing: which blocks of a model recompute their activations instead of keeping them.

Gradients and buffers are bit-identical to those without it, dropout included. In evaluation and without gradients a
block runs as it is. A SyncBatchNorm inside a block exchanges its statistics a second time, on all ranks in the same
order. What a block does beside its outputs and buffers, such as counting in a Python attribute, is done twice.

Apply it before the model is wrapped or compiled, and before `fully_shard`. Under `torch.compile` the compiler decides
itself what to keep of a checkpointed block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import nn

from paceline.core.arguments import Count, ExactlyOneOf, Positive, PositiveShare
from paceline.core.registry import register
from paceline.engine.activation_checkpointing.blocks import Block, best_number, find_blocks, join_neighbors
from paceline.engine.activation_checkpointing.checkpointed_module import checkpoint_block
from paceline.engine.activation_checkpointing.memory import cheapest_choice, measure_saved

Patterns = Annotated[
    Sequence[str], Field(description="Patterns of the modules to recompute; empty: found from the model's structure.")
]


@register.activation_checkpointing("none")
@dataclass(frozen=True)
class NoActivationCheckpointing:
    """Everything is kept."""


@register.activation_checkpointing("blocks")
@dataclass(frozen=True)
class Blocks:
    """Checkpoints every block, or every n-th, beginning with the first.

    Blocks are found from the model's structure, or are the modules that the patterns of `match` name. Without either,
    neighboring blocks that hold little inside go together, so that fewer inputs are kept between them.
    """

    every: Annotated[Count, Field(description="2: every second block, beginning with the first.")] = 1
    match: Patterns = ()


@register.activation_checkpointing("selective")
@dataclass(frozen=True)
class Selective:
    """Checkpoints every block, but keeps the outputs of its convolutions, matrix products and attention.

    It takes less time than `Blocks` and frees much less. A convolution whose output is changed in place by
    something else than an activation module cannot be kept; torch says so in the first backward pass.
    """

    match: Patterns = ()


@register.activation_checkpointing("budget", checks=[ExactlyOneOf("megabytes", "share")])
@dataclass(frozen=True)
class Budget:
    """Checkpoints as few blocks as possible so that what stays kept fits: megabytes (10⁶ bytes), or a share of all.

    Measured in one forward pass; it follows from the model and the shapes of that pass alone. What the block that is
    being recomputed holds meanwhile comes on top.
    """

    megabytes: Annotated[
        Positive | None, Field(description="Activations that may stay kept for a micro-batch, in 10⁶ bytes.")
    ] = None
    share: Annotated[
        PositiveShare | None, Field(description="The same as a share of what is kept without checkpointing.")
    ] = None
    match: Patterns = ()

    def __post_init__(self) -> None:
        if (self.megabytes is None) == (self.share is None):
            raise ValueError("budget: expected either megabytes or share, and not both")


Policy = NoActivationCheckpointing | Blocks | Selective | Budget


def apply_activation_checkpointing(
    model: nn.Module, how: Policy, trial: Callable[[], object] | None = None
) -> list[str]:
    """Have blocks of the model recompute their activations in the backward pass; returns their names.

    `trial` runs one forward pass of the model, in training mode and with gradients, on a micro-batch as large as any;
    only a budget needs it, and it leaves buffers and generators as they were.
    """
    if isinstance(how, NoActivationCheckpointing):
        return []
    blocks = find_blocks(model, how.match)
    if isinstance(how, Blocks):
        blocks = _every(model, blocks, how)
    elif isinstance(how, Budget):
        blocks = _within_budget(model, blocks, how, trial)
    keeps_products = isinstance(how, Selective)
    for block in blocks:
        _stop_working_in_place(block, keeps_products)
        checkpoint_block(block, keeps_products)
    return [block.name for block in blocks]


def _every(model: nn.Module, blocks: list[Block], how: Blocks) -> list[Block]:
    if how.match or how.every > 1:
        return blocks[:: how.every]
    return join_neighbors(model, blocks, best_number(blocks))


def _within_budget(
    model: nn.Module, blocks: list[Block], how: Budget, trial: Callable[[], object] | None
) -> list[Block]:
    if trial is None:
        raise ValueError("a budget is measured: apply_activation_checkpointing needs a trial that runs the model once")
    saved = measure_saved(model, blocks, trial)
    limit = how.megabytes * 1e6 if how.megabytes is not None else (how.share or 0.0) * saved.kept(set())
    chosen = cheapest_choice(saved, limit)
    if chosen is None:
        least = saved.kept(set(range(len(blocks))))
        raise ValueError(
            f"budget of {limit / 1e6:.1f} MB: {least / 1e6:.1f} MB of activations stay kept even when every"
            f" block of {len(blocks)} is checkpointed; raise the budget, or lower the micro-batch"
        )
    return [block for index, block in enumerate(blocks) if index in chosen]


def _stop_working_in_place(block: Block, keeps_products: bool) -> None:
    """Nothing may change what is kept: the input of a block, and the products kept within it.

    The numbers are the same either way.
    """
    modules = [each for module in block.modules() for each in module.modules() if not list(each.children())]
    for each in modules if keeps_products else modules[:1]:
        if getattr(each, "inplace", False) is True:
            each.inplace = False  # type: ignore[assignment]
