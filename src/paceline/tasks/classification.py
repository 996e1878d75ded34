"""Image classification, with one label per image or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.picture import heat_map, image_grid
from paceline.data.batch import Batch
from paceline.losses.term import Loss, Term
from paceline.metrics.answers import Answers
from paceline.metrics.classification import ConfusionMatrix, MultiLabel, TopK
from paceline.metrics.loss import LossFigures
from paceline.metrics.ranking import Auroc, MeanAveragePrecision
from paceline.metrics.state import Metric
from paceline.models.asking import ask
from paceline.tasks.task import Picture

_RANKED_CLASSES = 100  # beyond this the scores of a whole evaluation are too many to keep by default
_PICTURED = 24


class Classification:
    """Tells what is in an image."""

    def __init__(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float],
        classes: Sequence[str],
        extra_metrics: Sequence[Metric] = (),
        top_k: Sequence[int] = (1, 5),
        multi_label: bool = False,
    ) -> None:
        self.loss_functions = dict(losses)
        self.weights = dict(weights)
        self.classes = list(classes)
        self.main_figure = "f1" if multi_label else "top1"
        self.num_pictured = 0 if multi_label else _PICTURED
        self._multi_label = multi_label
        self._metrics: list[Metric] = [
            LossFigures(self.loss_functions, self.weights),
            *self._own_metrics(top_k),
            *extra_metrics,
        ]

    def counts(self, batch: Batch) -> dict[str, float | None]:
        """The denominator of each loss."""
        return {name: loss.count(batch) for name, loss in self.loss_functions.items()}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Term]:
        """Each loss of the model's logits."""
        logits = ask(model, batch["image"])
        return {name: loss(logits, batch) for name, loss in self.loss_functions.items()}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits [N, classes]."""
        logits: Tensor = ask(model, batch["image"])
        return logits

    def metrics(self) -> Sequence[Metric]:
        """Losses, accuracy, precision, recall, F1 and the area under the ROC curve."""
        return self._metrics

    def picture(self, batch: Batch, predictions: Tensor | None) -> Picture | None:
        """Images, framed by whether the prediction is right; without predictions, with their labels."""
        if self._multi_label:
            return None
        images, labels = viewable(batch["image"][:_PICTURED]), batch["label"][:_PICTURED]
        truth = (labels.argmax(1) if labels.ndim == 2 else labels).tolist()  # mixed samples have several
        if predictions is None:
            return image_grid(images, [self.classes[label] for label in truth], [None] * len(truth), columns=8)
        predicted = predictions[:_PICTURED].argmax(1).tolist()
        captions = [self._caption(guess, label) for guess, label in zip(predicted, truth, strict=True)]
        marks = ["good" if guess == label else "bad" for guess, label in zip(predicted, truth, strict=True)]
        return image_grid(images, captions, marks, columns=8)

    def tables(self, figures: dict[str, Any]) -> dict[str, Picture]:
        """The confusion matrix."""
        if "confusion" not in figures:
            return {}
        matrix = np.asarray(figures["confusion"])
        return {"confusion": heat_map(matrix, self.classes, self.classes, "Confusion matrix")}

    def answers(self) -> Metric:
        """What collects the probabilities of each sample."""
        return Answers(len(self.classes), self._multi_label)

    def _own_metrics(self, top_k: Sequence[int]) -> list[Metric]:
        num_classes = len(self.classes)
        counted: list[Metric]
        ranked: list[Metric]
        if self._multi_label:
            counted, ranked = [MultiLabel(num_classes)], [MeanAveragePrecision(num_classes), Auroc(num_classes)]
        else:
            counted, ranked = [TopK(sorted({1, *top_k})), ConfusionMatrix(num_classes)], [Auroc(num_classes)]
        return counted + (ranked if num_classes <= _RANKED_CLASSES else [])

    def _caption(self, guess: int, label: int) -> str:
        if guess == label:
            return self.classes[label]
        return f"{self.classes[guess]}, not {self.classes[label]}"


def viewable(images: Tensor | Sequence[Tensor]) -> list[Picture]:
    """Images [N, C, H, W] of any range as uint8 [H, W, 3], each stretched to its own range; also such of many sizes."""
    if not isinstance(images, Tensor):
        return [picture for image in images for picture in viewable(image.unsqueeze(0))]
    pictures = images.detach().float().cpu()
    low, high = pictures.amin((1, 2, 3), keepdim=True), pictures.amax((1, 2, 3), keepdim=True)
    scaled = (pictures - low) / (high - low).clamp(min=1e-6) * 255
    rgb = scaled.round().to(torch.uint8).permute(0, 2, 3, 1)  # [N, H, W, C]
    rgb = rgb[..., :3] if rgb.shape[-1] >= 3 else rgb[..., :1].expand(*rgb.shape[:-1], 3)
    return list(rgb.numpy())
