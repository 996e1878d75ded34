"""Averages of the weights over the run."""

from __future__ import annotations

from torch import nn


class NoAveraging:
    """Keeps no average."""

    def update(self, model: nn.Module) -> None:
        """Take in the weights after an update."""
