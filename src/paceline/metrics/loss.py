"""Losses as figures of an evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.losses.term import Loss
from paceline.metrics.state import Figures, State


class LossFigures:
    """Each loss over all samples, by its name, and their weighted sum as "loss".

    A loss whose denominator comes to 0 is not defined: it is left out, and "loss" with it.
    """

    def __init__(self, losses: dict[str, Loss], weights: dict[str, float]) -> None:
        self.losses = losses
        self.weights = weights

    def measure(self, predictions: Tensor, batch: Batch) -> State:
        """Numerator and denominator of each loss for one batch."""
        outputs = predictions.detach()
        state = {}
        for name, loss in self.losses.items():
            term = loss(outputs, batch)
            state[f"{name}.numerator"] = _one_row(term.numerator)
            state[f"{name}.denominator"] = _one_row(term.denominator)
        return state

    def figures(self, state: State) -> Figures:
        """The losses over all batches, and "loss"."""
        figures: Figures = {}
        for name in self.losses:
            # Python adds in the order of the batches; torch adds in an order that can depend on its threads.
            denominator = sum(state[f"{name}.denominator"].tolist())
            if denominator != 0:
                figures[name] = sum(state[f"{name}.numerator"].tolist()) / denominator
        if len(figures) == len(self.losses):
            figures["loss"] = sum(self.weights[name] * figures[name] for name in self.losses)
        return figures


def _one_row(value: Tensor | float) -> Tensor:
    number = value.item() if isinstance(value, Tensor) else value
    return torch.tensor([number], dtype=torch.float64)
