"""The task contract: all that differs between vision problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from paceline.core.errors import TrainingError
from paceline.core.signatures import signature_of
from paceline.data.batch import Batch, KeypointNames
from paceline.losses.adapter import Criterion, Pair
from paceline.losses.loss_term import Count, Loss, LossTerm
from paceline.metrics.adapter import MetricAdapter
from paceline.metrics.metric import LossMetrics, Metric
from paceline.models.model_errors import call_model
from paceline.visualize.grid import Panel
from paceline.visualize.image import Image, fit, to_image

_IMAGE_SIDE = 160


def check_terms(task: Task, terms: Any) -> Mapping[str, LossTerm]:
    """What a task's `losses` gave; raises TrainingError unless it has a `LossTerm` for each weight."""
    found: str | None = None
    if type(terms) is not dict and not isinstance(terms, Mapping):  # which takes long to answer
        found = f"gave {type(terms).__name__}"
    elif missing := [name for name in task.weights if name not in terms]:
        found = f"gave {', '.join(map(repr, terms)) or 'nothing'}, but no {missing[0]!r}"
    elif wrong := [name for name, term in terms.items() if not isinstance(term, LossTerm)]:
        found = f"gave {type(terms[wrong[0]]).__name__} as {wrong[0]!r}"
    elif wrong := [name for name in task.weights if not isinstance(terms[name].numerator, Tensor)]:
        found = f"gave LossTerm({type(terms[wrong[0]].numerator).__name__}, …) as {wrong[0]!r}"
    if found is None:
        return cast("Mapping[str, LossTerm]", terms)
    names = ", ".join(f'"{name}": LossTerm(total, count)' for name in task.weights)
    raise TrainingError(
        f"task {type(task).__name__}: losses {found}; expected a dict with a LossTerm for each loss of the recipe:"
        f" {{{names}}}"
    )


def compare_by(pair: Pair, parts: Iterable[Any]) -> None:
    """Have losses and metrics of a user's, among these, be given what `pair` makes of outputs and a batch."""
    for part in parts:
        if isinstance(part, Criterion | MetricAdapter):
            part.pair = pair


def check_task(task: Any) -> None:
    """Raise ValueError or TypeError unless a task has what the engine reads of it."""
    name = type(task).__name__
    for attribute in ("weights", "main_metric"):
        if not hasattr(task, attribute):
            cure = "call super().__init__(**parts)" if isinstance(task, Task) else f"set self.{attribute}"
            raise ValueError(f"{name} has no {attribute}: in its __init__, {cure}")
    metrics: Any = task.metrics()
    if not isinstance(metrics, list | tuple):
        found = type(metrics).__name__
        raise TypeError(f"{name}.metrics gave {found}, expected a list: `return [*super().metrics(), Mine()]`")
    for metric in metrics:
        compute = getattr(metric, "compute", None)
        if compute is None or "state" not in signature_of(compute).parameters:
            found = type(metric).__name__
            raise ValueError(
                f"{name}.metrics gave {found}, which has no compute(state); register a metric with"
                " update(preds, target) and compute() by a name, and list the name in evaluate.metrics"
            )


class Task:
    """A vision problem. The engine calls these methods and knows nothing else about it.

    The defaults pass the model's output to losses and metrics unchanged; a task overrides what differs. A task with
    arguments of its own hands on the rest: `def __init__(self, scale: float = 1.0, **parts)`.
    Your class may also have these methods without inheriting them. Predictions are saved as tables or arrays; with
    `palette` and `maps` as PNG files, with `classes` and `prediction_metric` as classes.
    `sample_errors(predictions, batch)` gives a number for each sample of a batch, [N]: the worst are drawn for reports.
    """

    main_metric: str = "loss"
    """The metric by which one model is better than another."""
    training_metrics: Sequence[str] = ()
    """What `training_terms` gives, by name: metrics of training batches, logged beside the losses."""
    num_visualized: int = 8
    """How many samples of a split are drawn; 0 for none."""
    error_name: str = "error"
    """What `sample_errors` measures, as reports call it."""
    pads_images: bool = False
    """Whether images of different sizes may be padded into one batch; otherwise they are refused."""
    original_size: bool = False
    """What `evaluate.original_size: auto` stands for."""
    output_name: str = "output"
    """What an exported model's output is called."""
    activation: str | None = None
    """What makes probabilities of an exported model's output, if anything does."""

    def __init__(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float],
        classes: Sequence[str] = (),
        extra_metrics: Sequence[Metric] = (),
        ignore_index: int | None = None,
        model: nn.Module | None = None,
        joints: KeypointNames | None = None,
    ) -> None:
        self.ignore_index = ignore_index
        self.loss_functions = dict(losses)
        self.weights = dict(weights)
        """The weight of each loss in the sum that is minimized."""
        self.classes = list(classes)
        self._metrics: list[Metric] = [LossMetrics(self.loss_functions, self.weights), *extra_metrics]

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Call the model; its output for a batch goes to the losses."""
        return call_model(model, batch["image"])

    def counts(self, batch: Batch) -> dict[str, Count]:
        """The denominator of each loss, or None where it depends on predictions."""
        return {name: loss.count(batch) for name, loss in self.loss_functions.items()}

    def divisors(self, counts: Mapping[str, float]) -> Mapping[str, float]:
        """What losses are divided by, given the counts of the global batch that the host knows: these themselves."""
        return counts

    def losses(self, model: nn.Module, batch: Batch) -> Mapping[str, LossTerm]:
        """Each loss of a micro-batch as a numerator and a denominator."""
        outputs = self._forward(model, batch)
        terms = {name: loss(outputs, batch) for name, loss in self.loss_functions.items()}
        return {**self.training_terms(outputs, batch), **terms}

    def training_terms(self, outputs: Any, batch: Batch) -> Mapping[str, LossTerm]:
        """Each training metric of a micro-batch as a sum and a count, without reading a value from the device."""
        return {}

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        """The predictions that `metrics` and `draw` get."""
        return self._forward(model, batch)

    def _forward(self, model: nn.Module, batch: Batch) -> Any:
        outputs = self.forward(model, batch)
        if outputs is None:
            raise TrainingError(f"task {type(self).__name__}: forward gave None; return the model's output")
        return outputs

    def metrics(self) -> Sequence[Metric]:
        """The metrics of an evaluation: the losses, and those that the recipe adds."""
        return self._metrics

    def draw(self, batch: Batch, predictions: Any | None, index: int) -> Sequence[Panel]:
        """Draw sample `index` of a batch with its prediction, or a training sample without: images side by side.

        The process that predicted the sample draws it and sends it to rank 0, so resize panels to the size at which
        they are shown, with `visualize.image.fit`.
        """
        return [Panel(fit(to_image(batch.image(index)), _IMAGE_SIDE))]

    def draw_prediction(self, image: Image, batch: Batch, predictions: Any, index: int) -> Panel:
        """Draw what is predicted for sample `index` over its image as it was read, uint8 [H, W, 3]."""
        return Panel(image)

    def export_outputs(self, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """What an exported model gives for a batch of images: tensors by name, the batch first in each."""
        found = model(images)
        return dict(found) if isinstance(found, Mapping) else {self.output_name: found}

    def export_details(self) -> dict[str, Any]:
        """What a program must know to make predictions of the exported outputs, as JSON."""
        return {"activation": self.activation} if self.activation else {}

    def draw_metrics(self, metrics: dict[str, Any]) -> dict[str, Image]:
        """Draw values such as a confusion matrix; the images by name."""
        return {}
