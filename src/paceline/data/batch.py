"""The two things that data is handed around as: a sample and a batch of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.data.skipping import Skipped

Sample = dict[str, Any]
"""One example as a data set reads it: "image" as uint8 [H, W, C], and what the task needs ("label", ...)."""


class Batch(dict[str, Any]):
    """Samples stacked by field: "id" [N] always, "image" [N, C, H, W], and what the task needs ("label", ...)."""

    skipped: Sequence[Skipped] = ()
    """Samples that belong here but could not be read; they are not among those it holds."""
    is_stand_in: bool = False
    """Whether none could be read: it holds another sample, repeated, which counts for nothing."""

    @property
    def ids(self) -> Tensor:
        """Each sample's number in its data set, int64 [N]."""
        ids: Tensor = self["id"]
        return ids

    @property
    def size(self) -> int:
        """How many samples it holds."""
        return len(self["id"])

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        moved = Batch({name: _move(value, device) for name, value in self.items()})
        if self.skipped:
            moved.skipped, moved.is_stand_in = self.skipped, self.is_stand_in
        return moved


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if isinstance(value, list):
        return [_move(item, device) for item in value]
    if isinstance(value, dict):
        return {name: _move(item, device) for name, item in value.items()}
    return value
