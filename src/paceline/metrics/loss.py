"""Losses as metrics of an evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.losses.loss_term import Loss
from paceline.metrics.metric import Figures, State


class LossMetrics:
    """Each loss over all samples, by its name, and their weighted sum as "loss".

    A loss whose denominator comes to 0 is not defined: it is left out, and "loss" with it.
    """

    def __init__(self, losses: dict[str, Loss], weights: dict[str, float]) -> None:
        self.losses = losses
        self.weights = weights
        self.higher_is_better = dict.fromkeys((*losses, "loss"), False)

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """Numerator and denominator of each loss for one batch."""
        outputs = predictions.detach()
        state = {}
        for name, loss in self.losses.items():
            term = loss(outputs, batch)
            state[f"{name}.numerator"] = _one_row(term.numerator)
            state[f"{name}.denominator"] = _one_row(term.denominator)
        return state

    def compute(self, state: State) -> Figures:
        """The losses over all batches, and "loss"."""
        metrics: Figures = {}
        for name in self.losses:
            # Python adds in the order of the batches; torch adds in an order that can depend on its threads.
            denominator = sum(state[f"{name}.denominator"].tolist())
            if denominator != 0:
                metrics[name] = sum(state[f"{name}.numerator"].tolist()) / denominator
        if len(metrics) == len(self.losses):
            metrics["loss"] = sum(self.weights[name] * metrics[name] for name in self.losses)
        return metrics


def _one_row(value: Tensor | float) -> Tensor:
    number = value.item() if isinstance(value, Tensor) else value
    return torch.tensor([number], dtype=torch.float64)
