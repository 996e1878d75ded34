"""What a task is: all that differs between vision problems, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import nn

from paceline.data.batch import Batch
from paceline.losses.term import Term
from paceline.metrics.state import Metric

Picture = npt.NDArray[np.uint8]
"""Something a person can look at, [H, W, 3]."""


class Task(Protocol):
    """A vision problem. The engine calls these methods and knows nothing else about it.

    Some have more: `num_pictured`, how many samples of an evaluation `picture` draws (8, if it is not there); `glimpse`
    (see `Glimpses`); `palette` and `maps`, or `classes` and `answers`, by which predictions are saved.
    """

    weights: dict[str, float]
    """The weight of each loss in the sum that is minimised."""
    main_figure: str
    """The figure by which one model is better than another."""

    def counts(self, batch: Batch) -> dict[str, float | None]:
        """The denominator of each loss, or None where it contains predictions."""
        ...

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Term]:
        """Each loss of a micro-batch as a numerator and a denominator."""
        ...

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        """What the metrics and the picture are made from."""
        ...

    def metrics(self) -> Sequence[Metric]:
        """How predictions are measured."""
        ...

    def picture(self, batch: Batch, predictions: Any | None) -> Picture | None:
        """The batch with its predictions drawn, or alone, if there is something to draw.

        With predictions it is of samples from all over a split, if predictions are tensors with samples along their
        first axis, or lists, tuples and dicts of such. Where samples differ in their sizes, there are lists in place of
        tensors.
        """
        ...

    def tables(self, figures: dict[str, Any]) -> dict[str, Picture]:
        """Figures that are better looked at than read, drawn; by name."""
        ...


@runtime_checkable
class Glimpses(Protocol):
    """A task whose picture needs less than all that is known of a sample: only that is kept until it is drawn."""

    def glimpse(self, batch: Batch, predictions: Any) -> tuple[Batch, Any]:
        """What `picture` needs of some samples and their predictions."""
        ...
