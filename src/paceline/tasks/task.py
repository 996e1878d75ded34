"""What a task is: all that differs between vision problems, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from paceline.data.batch import Batch
from paceline.losses.loss_term import LossTerm
from paceline.metrics.metric import Metric
from paceline.visualize.grid import Panel
from paceline.visualize.image import Image


class Task(Protocol):
    """A vision problem. The engine calls these methods and knows nothing else about it.

    Some have more: `num_visualized`, how many samples of a split are drawn (8 if it is not there, none if it is 0);
    `palette` and `maps`, or `classes` and `answers`, by which predictions are saved.
    """

    weights: dict[str, float]
    """The weight of each loss in the sum that is minimized."""
    main_metric: str
    """The metric by which one model is better than another."""

    def counts(self, batch: Batch) -> dict[str, float | None]:
        """The denominator of each loss, or None where it contains predictions."""
        ...

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, LossTerm]:
        """Each loss of a micro-batch as a numerator and a denominator."""
        ...

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        """What `metrics` and `draw` are given."""
        ...

    def metrics(self) -> Sequence[Metric]:
        """How predictions are measured."""
        ...

    def draw(self, batch: Batch, predictions: Any | None, index: int) -> Sequence[Panel]:
        """Draw sample `index` of a batch with its prediction, or a training sample without: images side by side.

        An evaluation calls this on the process that predicted the sample, so a panel should be no larger than it is
        shown: `visualize.image.fit` makes it so.
        """
        ...

    def draw_metrics(self, metrics: dict[str, Any]) -> dict[str, Image]:
        """Draw metrics that are better looked at than read, such as a confusion matrix; by name."""
        ...
