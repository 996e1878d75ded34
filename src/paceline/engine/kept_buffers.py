"""Buffers as they were before an update, in case it is left out: numbers that are not finite spoil statistics too."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NotKept:
    """No update is ever left out."""

    def keep(self) -> None:
        """Keep nothing."""

    def put_back(self) -> None:
        """Nothing was kept."""


class KeptBuffers:
    """Copies of a model's buffers, in memory that is used again."""

    def __init__(self, model: nn.Module) -> None:
        groups: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            groups.setdefault(buffer.dtype, []).append(buffer)
        self._groups = [(group, [buffer.clone() for buffer in group]) for group in groups.values()]

    def keep(self) -> None:
        """Before an update."""
        for own, copies in self._groups:
            torch._foreach_copy_(copies, own)

    def put_back(self) -> None:
        """When it was left out."""
        for own, copies in self._groups:
            torch._foreach_copy_(own, copies)
