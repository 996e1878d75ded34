"""Bytes that a model keeps for its backward pass, measured, and the blocks worth checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from paceline.engine.activation_checkpointing.blocks import Block
from paceline.engine.stateful import unchanged_buffers

_OUTSIDE = -1
_OPERATIONS_PER_BYTE = 20
"""About how many operations take as long as writing a byte; only the order of the blocks' costs depends on it."""


@dataclass
class SavedBytes:
    """The storages that blocks keep and take in, by number; those of parameters and buffers are left out."""

    sizes: dict[int, int] = field(default_factory=dict)
    inside: dict[int, set[int]] = field(default_factory=lambda: {_OUTSIDE: set()})
    inputs: dict[int, set[int]] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """The number of blocks measured."""
        return len(self.costs)

    def kept(self, checkpointed: set[int]) -> int:
        """Bytes kept at the end of the forward pass if these blocks keep only their inputs."""
        storages = set(self.inside[_OUTSIDE])
        for block in range(self.num_blocks):
            storages |= self.inputs[block] if block in checkpointed and self.inside[block] else self.inside[block]
        return sum(self.sizes[each] for each in storages)


def measure_saved(model: nn.Module, blocks: Sequence[Block], trial: Callable[[], object]) -> SavedBytes:
    """Run `trial` once and record what each block would keep; nothing is kept, so it needs little memory."""
    cuda = sorted({each.device.index for each in model.parameters() if each.device.type == "cuda"})
    with ExitStack() as stack:
        stack.enter_context(unchanged_buffers(model))
        ledger = _Ledger(model, len(blocks))
        for number, block in enumerate(blocks):
            first, last = block.modules()[0], block.modules()[-1]
            for handle in (
                first.register_forward_pre_hook(ledger.entering(number), with_kwargs=True, prepend=True),
                last.register_forward_hook(ledger.leave),
            ):
                stack.callback(handle.remove)
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(saved_tensors_hooks(ledger.save, _refuse))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(ledger)
        trial()
    return ledger.found


def cheapest_choice(saved: SavedBytes, limit: float) -> set[int] | None:
    """The blocks to checkpoint so that at most `limit` bytes are kept; None if all of them are not enough.

    Taken in order of bytes freed per cost; those that later turn out not to be needed are given back.
    """
    chosen: list[int] = []
    while (now := saved.kept(set(chosen))) > limit:
        rest = [block for block in range(saved.num_blocks) if block not in chosen]
        gains = {
            block: (now - saved.kept({*chosen, block})) / saved.costs[block] for block in rest if saved.costs[block]
        }
        best = max(gains, key=lambda block: (gains[block], -block), default=None)
        if best is None or gains[best] <= 0:
            return None
        chosen.append(best)
    for block in sorted(chosen, key=lambda each: saved.costs[each], reverse=True):
        without = set(chosen) - {block}
        if saved.kept(without) <= limit:
            chosen.remove(block)
    return set(chosen)


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks a forward pass: which block is running, what it saves, and how many operations it does."""

    def __init__(self, model: nn.Module, num_blocks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = SavedBytes()
        for number in range(num_blocks):
            self.found.inside[number], self.found.inputs[number], self.found.costs[number] = set(), set(), 0.0
        self.running = _OUTSIDE
        self.numbers: dict[int, tuple[int, StorageWeakRef]] = {}
        self.own = {self.number(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def number(self, tensor: Tensor) -> int:
        """A number for the tensor's storage; the weak reference keeps its address from being used again."""
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        number, _ = self.numbers.setdefault(reference.cdata, (len(self.numbers), reference))
        self.found.sizes.setdefault(number, tensor.untyped_storage().nbytes())
        return number

    def entering(self, block: int) -> Callable[[nn.Module, Any, Any], None]:
        """A hook that records the inputs of the block."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.running = block
            inputs = {self.number(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            self.found.inputs[block] |= inputs - self.own

        return enter

    def leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """The running block has finished."""
        self.running = _OUTSIDE

    def save(self, tensor: Tensor) -> None:
        """Record a tensor that the backward pass needs, and drop it."""
        number = self.number(tensor)
        if number not in self.own:
            self.found.inside[self.running].add(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if self.running != _OUTSIDE:
            written = sum(each.nbytes for each in tree_leaves(outputs) if isinstance(each, Tensor))
            count = flop_registry.get(func._overloadpacket)
            operations = count(*args, **(kwargs or {}), out_val=outputs) if count else 0
            self.found.costs[self.running] += operations + _OPERATIONS_PER_BYTE * written
        return outputs


def _refuse(saved: Any) -> Tensor:
    raise RuntimeError("the trial of a budget is a forward pass: it must not run backward")
