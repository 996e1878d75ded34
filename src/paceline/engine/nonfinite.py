"""Non-finite gradients never reach the weights, the buffers or a checkpoint; where one came from is traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.checkpoint.state import Tree
from paceline.core.errors import TrainingError
from paceline.core.text import join_first
from paceline.data.loader import MicroBatch
from paceline.engine.stateful import Parts, copy_state, load_state
from paceline.losses.loss_term import LossTerm

OnNonFinite = Literal["stop", "skip"]


class FiniteCheck:
    """Checks the gradient norm, equal on all ranks: stop, or skip at most `limit` steps in a row."""

    def __init__(self, policy: OnNonFinite = "stop", limit: int = 10) -> None:
        self.policy = policy
        self.limit = limit
        self.in_a_row = 0

    def accepts(self, norm: Tensor, step: int, explain: Callable[[], str], warn: Callable[[str], None]) -> bool:
        """Whether the optimizer may step; raises TrainingError if the run must stop."""
        if math.isfinite(norm.item()):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        what = f"the gradient of step {step + 1} is not finite (norm {norm.item():g}): {explain()}"
        if self.policy == "skip" and self.in_a_row <= self.limit:
            warn(f"{what}; the step is skipped")
            return False
        row = f" {self.in_a_row} times in a row" if self.in_a_row > 1 else ""
        cure = "Try a lower optimizer.lr, warm-up, or train.clip_grad_norm"
        if step == 0:
            cure = "No update was made yet, so the cause is in the data, the model or the loss"
        raise TrainingError(f"{what}{row}; the weights before it are kept. {cure}")


class NoBackup:
    """For runs that never skip a step."""

    def keep(self) -> None:
        """Keep nothing."""

    def restore(self) -> None:
        """Nothing was kept."""


class BufferBackup:
    """Copies of a model's buffers, in reused memory, and of the state of losses."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        self._parts = parts
        self._state: Tree = {}
        groups: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            groups.setdefault(buffer.dtype, []).append(buffer)
        self._groups = [(group, [buffer.clone() for buffer in group]) for group in groups.values()]

    def keep(self) -> None:
        """Before a step."""
        for own, copies in self._groups:
            torch._foreach_copy_(copies, own)
        self._state = copy_state(self._parts)

    def restore(self) -> None:
        """After a skipped step."""
        for own, copies in self._groups:
            torch._foreach_copy_(own, copies)
        load_state(self._parts, self._state)


Forward = Callable[[MicroBatch], Mapping[str, LossTerm]]
"""The losses of a micro-batch."""
_MAX_IDS = 8


def find_nonfinite(model: nn.Module, micro_batches: Sequence[MicroBatch], forward: Forward) -> str:
    """What is not finite in this rank's part of a step, in one sentence; the forward passes are repeated."""
    bad_gradients = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not _is_finite(parameter.grad)
    ]
    # All of them, whatever the first says: processes may have to keep step with each other.
    found = [_first_bad_module(model, micro, forward) for micro in micro_batches]
    for micro, sentence in zip(micro_batches, found, strict=True):
        if sentence is not None and not micro.is_padding:
            return sentence
    if bad_gradients:
        return f"outputs are finite, the gradients of {join_first(bad_gradients[::-1], 3)} are not"
    return "all values on this rank are finite"


def _first_bad_module(model: nn.Module, micro: MicroBatch, forward: Forward) -> str | None:
    first = [
        f"{name} of {_samples(value, micro)} is not finite before the model sees it"
        for name, value in micro.batch.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not _is_finite(value)
    ]

    def look(module: nn.Module, args: Any, output: Any, name: str) -> None:
        if not first:
            for value in tree_leaves(output):
                if isinstance(value, Tensor) and value.is_floating_point() and not _is_finite(value):
                    kind = type(module).__name__
                    first.append(
                        f"{name or 'the model'} ({kind}) gives what is not finite for {_samples(value, micro)}"
                    )
                    return

    with ExitStack() as stack:
        for name, module in model.named_modules():
            handle = module.register_forward_hook(lambda m, a, o, name=name: look(m, a, o, name))
            stack.callback(handle.remove)
        terms = forward(micro)
    if first:
        return first[0]
    bad = [name for name, term in terms.items() if not _is_finite(term.numerator)]
    return f"the model's outputs are finite, the loss {bad[0]} is not, for {_samples(None, micro)}" if bad else None


def _samples(value: Tensor | None, micro: MicroBatch) -> str:
    """The samples whose rows are not finite, or else all of the micro-batch."""
    ids = micro.batch.ids
    if value is not None and value.ndim and len(value) == len(ids):
        rows = ~torch.isfinite(value.reshape(len(value), -1)).all(1).cpu()
        ids = ids[rows]
    return f"sample{'s' if len(ids) > 1 else ''} {join_first(ids.tolist(), _MAX_IDS)}"


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(getattr(value, "to_local", lambda: value)()).all())
