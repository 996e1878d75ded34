"""Image classification, single-label or multi-label."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count
from paceline.core.errors import RecipeError
from paceline.core.registry import register
from paceline.core.text import join_first
from paceline.core.world import to_float64
from paceline.data.batch import Batch
from paceline.losses.classification import labels_of
from paceline.losses.loss_term import Loss, LossTerm
from paceline.metrics.classification import (
    Auroc,
    ConfusionMatrix,
    MeanAveragePrecision,
    MultiLabel,
    SamplePredictions,
    TopK,
)
from paceline.metrics.metric import Metric
from paceline.tasks.task import Task
from paceline.visualize.confusion_matrix import draw_confusion_matrix
from paceline.visualize.grid import Panel
from paceline.visualize.image import Image, fit, to_image

_MAX_RANKED = 100  # classes; with more, the scores of a whole evaluation take too much memory
_NUM_VISUALIZED, _IMAGE_SIDE = 24, 96


@register.task("classification")
class Classification(Task):
    """Image classification, single-label or multi-label.

    `Task.losses` runs the model and the losses of losses/classification.py, which are divided by the number of samples,
    or by the sum of their class weights. Predictions are logits [N, classes].
    Metrics are losses, accuracy, precision, recall, F1 and AUROC.
    """

    num_visualized = _NUM_VISUALIZED
    output_name = "logits"

    def __init__(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float],
        classes: Sequence[str],
        extra_metrics: Sequence[Metric] = (),
        top_k: Annotated[Sequence[Count], Field(min_length=1)] = (1, 5),
        multi_label: bool = False,
        flip: Annotated[
            bool, Field(description="Averages the probabilities of each image and its mirror image.")
        ] = False,
    ) -> None:
        super().__init__(losses, weights, classes)
        self.main_metric = "f1" if multi_label else "top1"
        self.activation = "sigmoid" if multi_label else "softmax"
        self.error_name = "binary cross-entropy" if multi_label else "cross-entropy"
        self._multi_label = multi_label
        self._flip = flip
        self._top_k = [k for k in sorted({1, *top_k}) if k <= len(self.classes)]
        self.training_metrics = ["accuracy"] if multi_label else [f"top{k}" for k in self._top_k]
        self._metrics += [*self._own_metrics(top_k), *extra_metrics]

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        logits = super().forward(model, batch)
        size, num_classes = batch["image"].shape[0], len(self.classes)
        if not isinstance(logits, Tensor):
            return logits
        if logits.ndim != 2 or logits.shape[0] != size or logits.shape[1] < num_classes:
            cure = "build it with num_classes, and return a row for each sample"
            if logits.ndim != 2:
                cure = "end it with pooling, Flatten and a Linear layer"
            raise RecipeError(
                f"model: gave an output of shape {list(logits.shape)}, expected [{size}, {num_classes}], a number for"
                f" each class of each sample: {cure}"
            )
        return logits

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits [N, classes]."""
        logits: Tensor = self.forward(model, batch)
        if not self._flip:
            return logits
        flipped: Tensor = self.forward(model, Batch(batch, image=batch["image"].flip(-1)))
        return average_logits(torch.stack([logits, flipped], 1).float(), self._multi_label)

    def training_terms(self, outputs: Tensor, batch: Batch) -> Mapping[str, LossTerm]:
        """Top-k accuracy, of mixed samples for their main label; of several labels, the share that is right."""
        logits, labels = outputs.detach(), labels_of("classification", batch)
        if self._multi_label:
            correct = (logits > 0) == (labels > 0.5)
            return {"accuracy": LossTerm(correct.sum().float(), float(correct.numel()))}
        target = labels.argmax(1) if labels.ndim == 2 else labels
        # How many classes the label is at least as likely as, itself included; none if it is NaN.
        behind = (logits <= logits.gather(1, target.unsqueeze(1))).sum(1, dtype=torch.int32)
        count, num_classes = float(labels.shape[0]), logits.shape[1]
        return {f"top{k}": LossTerm((behind > num_classes - k).sum().float(), count) for k in self._top_k}

    def draw(self, batch: Batch, predictions: Tensor | None, index: int) -> list[Panel]:
        """Draw the image with its label, framed in green or red by whether the prediction is correct."""
        truth = self._caption(batch["label"][index], 0.5)
        image = self.thumbnail(batch["image"][index])
        if predictions is None:
            return [Panel(image, truth)]
        predicted = self._caption(self.sample_logits(predictions)[index], 0.0)
        if predicted == truth:
            return [Panel(image, truth, is_correct=True)]
        return [Panel(image, f"{predicted}, not {truth}", is_correct=False)]

    def sample_errors(self, predictions: Tensor, batch: Batch) -> Tensor:
        """The cross-entropy of each sample, [N]."""
        logits, labels = to_float64(self.sample_logits(predictions)), labels_of("classification", batch)
        labels = labels.to(logits.device)
        if self._multi_label:
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none").mean(1)
        if labels.ndim == 2:  # soft ones
            return -(logits.log_softmax(1)[:, : labels.shape[1]] * labels).sum(1)
        return F.cross_entropy(logits, labels, reduction="none")

    def sample_logits(self, predictions: Tensor) -> Tensor:
        """Logits [N, classes] of what `predict` gives."""
        return predictions

    def _caption(self, scores: Tensor, threshold: float) -> str:
        """The class with the highest score, or the number of the class; with `multi_label` those above a threshold."""
        if not self._multi_label:
            return self.classes[int(scores.argmax() if scores.ndim else scores)]  # mixup gives several
        return join_first([self.classes[index] for index in (scores > threshold).nonzero().flatten()], 3) or "none"

    def thumbnail(self, image: Tensor) -> Image:
        """The image [C, H, W] at the size at which it is drawn."""
        return fit(to_image(image), _IMAGE_SIDE)

    def draw_prediction(self, image: Image, batch: Batch, predictions: Tensor, index: int) -> Panel:
        """Draw the image above the most probable class and its probability."""
        logits = to_float64(self.sample_logits(predictions)[index])
        probabilities = logits.sigmoid() if self._multi_label else logits.softmax(0)
        best = int(probabilities.argmax())
        return Panel(image, f"{self.classes[best]} {float(probabilities[best]):.2f}")

    def draw_metrics(self, metrics: dict[str, Any]) -> dict[str, Image]:
        if "confusion" not in metrics:
            return {}
        return {"confusion": draw_confusion_matrix(metrics["confusion"], self.classes, "Confusion matrix")}

    def prediction_metric(self) -> Metric:
        return SamplePredictions(len(self.classes), self._multi_label)

    def _own_metrics(self, top_k: Sequence[int]) -> list[Metric]:
        num_classes = len(self.classes)
        counted: list[Metric]
        ranked: list[Metric]
        if self._multi_label:
            counted, ranked = [MultiLabel(num_classes)], [MeanAveragePrecision(num_classes), Auroc(num_classes)]
        else:
            counted, ranked = [TopK(sorted({1, *top_k})), ConfusionMatrix(num_classes)], [Auroc(num_classes)]
        return counted + (ranked if num_classes <= _MAX_RANKED else [])


def average_logits(logits: Tensor, multi_label: bool) -> Tensor:
    """Logits [N, classes] of the mean probabilities of views [N, V, classes]."""
    if multi_label:
        return to_float64(logits).sigmoid().mean(1).logit(eps=1e-12).to(logits)
    return logits.log_softmax(2).logsumexp(1) - math.log(logits.shape[1])
