"""The finite check: a non-finite gradient never reaches the weights, the buffers or a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import Tree
from paceline.core.errors import TrainingError
from paceline.engine.stateful import Parts, copy_state, load_state

OnNonFinite = Literal["stop", "skip"]


class FiniteCheck:
    """Judges the gradient norm, which all ranks share: stop, or skip at most `limit` steps in a row."""

    def __init__(self, policy: OnNonFinite = "stop", limit: int = 10) -> None:
        self.policy = policy
        self.limit = limit
        self.in_a_row = 0

    def accepts(self, norm: Tensor, step: int, explain: Callable[[], str], warn: Callable[[str], None]) -> bool:
        """Whether the optimizer may step; raises TrainingError if the run has to end."""
        if math.isfinite(norm.item()):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        what = f"the gradient of step {step + 1} is not finite (norm {norm.item():g}): {explain()}"
        if self.policy == "skip" and self.in_a_row <= self.limit:
            warn(f"{what}; the step is skipped")
            return False
        row = f" {self.in_a_row} times in a row" if self.in_a_row > 1 else ""
        raise TrainingError(
            f"{what}{row}; the weights before it are kept. Try a lower optimizer.lr, warm-up, or train.clip_grad_norm"
        )


class NotKept:
    """No update is ever left out."""

    def keep(self) -> None:
        """Keep nothing."""

    def restore(self) -> None:
        """Nothing was kept."""


class KeptBuffers:
    """Copies of a model's buffers, in memory that is used again, and of what losses remember."""

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
        """When it was left out."""
        for own, copies in self._groups:
            torch._foreach_copy_(own, copies)
        load_state(self._parts, self._state)
