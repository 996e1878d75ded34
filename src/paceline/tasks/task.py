"""What a task is: all that differs between vision problems, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from paceline.data.batch import Batch
from paceline.losses.loss_term import Loss, LossTerm
from paceline.metrics.metric import LossMetrics, Metric
from paceline.models.forward import ask
from paceline.visualize.grid import Panel
from paceline.visualize.image import Image, fit, to_image

_IMAGE_SIDE = 160


class Task:
    """A vision problem. The engine calls these methods and knows nothing else about it.

    Each has a default, for models whose output losses and metrics take as it is; a task overrides what differs. A class
    that has these methods without inheriting them is as good. Some have more: `palette` and `maps`, or `classes` and
    `answers`, by which predictions are saved.
    """

    main_metric: str = "loss"
    """The metric by which one model is better than another."""
    num_visualized: int = 8
    """How many samples of a split are drawn."""

    def __init__(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float],
        classes: Sequence[str] = (),
        extra_metrics: Sequence[Metric] = (),
    ) -> None:
        self.loss_functions = dict(losses)
        self.weights = dict(weights)
        """The weight of each loss in the sum that is minimized."""
        self.classes = list(classes)
        self._metrics: list[Metric] = [LossMetrics(self.loss_functions, self.weights), *extra_metrics]

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """What the model gives for a batch, and losses take."""
        return ask(model, batch["image"])

    def counts(self, batch: Batch) -> dict[str, float | None]:
        """The denominator of each loss, or None where it contains predictions."""
        return {name: loss.count(batch) for name, loss in self.loss_functions.items()}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, LossTerm]:
        """Each loss of a micro-batch as a numerator and a denominator."""
        outputs = self.forward(model, batch)
        return {name: loss(outputs, batch) for name, loss in self.loss_functions.items()}

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        """What `metrics` and `draw` are given."""
        return self.forward(model, batch)

    def metrics(self) -> Sequence[Metric]:
        """How predictions are measured: the losses, and the metrics that the recipe adds."""
        return self._metrics

    def draw(self, batch: Batch, predictions: Any | None, index: int) -> Sequence[Panel]:
        """Draw sample `index` of a batch with its prediction, or a training sample without: images side by side.

        An evaluation calls this on the process that predicted the sample, so a panel should be no larger than it is
        shown: `visualize.image.fit` makes it so.
        """
        return [Panel(fit(to_image(batch["image"][index]), _IMAGE_SIDE))]

    def draw_metrics(self, metrics: dict[str, Any]) -> dict[str, Image]:
        """Draw metrics that are better looked at than read, such as a confusion matrix; by name."""
        return {}
