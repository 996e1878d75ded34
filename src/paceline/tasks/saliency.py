"""Salient objects: how much each pixel belongs to what an image is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from paceline.core.errors import DataError
from paceline.data.batch import Batch
from paceline.losses.term import Loss, Term
from paceline.metrics.loss import LossFigures
from paceline.metrics.saliency import Saliency as SaliencyFigures
from paceline.metrics.saliency import prepared
from paceline.metrics.state import Metric
from paceline.models.asking import ask
from paceline.tasks.classification import viewable
from paceline.tasks.dense_pictures import grey, shaped, side_by_side
from paceline.tasks.dense_prediction import DensePrediction, OfLogits, OfMaps, at_truth, main_output, resized, truths
from paceline.tasks.task import Picture

_PICTURED = 8


class Saliency:
    """Finds the salient objects of an image: a map from 0 to 1 beside a mask from 0 to 255.

    All figures of saliency are measured, or those that the recipe chooses by naming the metric itself.
    """

    palette = None
    """Saved maps are grey."""

    def __init__(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float],
        classes: Sequence[str],
        extra_metrics: Sequence[Metric] = (),
    ) -> None:
        if len(classes) > 1:
            raise DataError(f"saliency: the masks have {len(classes)} classes, expected one; set binary: true in data")
        self.loss_functions = dict(losses)
        self.weights = dict(weights)
        self.main_figure = "max_f"
        chosen = [metric for metric in extra_metrics if isinstance(metric, SaliencyFigures)]
        measured = extra_metrics if chosen else [SaliencyFigures(), *extra_metrics]
        self._stretch = chosen[0].stretch if chosen else True
        self._metrics: list[Metric] = [
            OfLogits(LossFigures(self.loss_functions, self.weights)),
            *(OfMaps(metric) for metric in measured),
        ]

    def counts(self, batch: Batch) -> dict[str, float | None]:
        """The denominator of each loss."""
        return {name: loss.count(batch) for name, loss in self.loss_functions.items()}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Term]:
        """Each loss of the model's logits [N, 1, H, W]."""
        logits = self._logits(model, batch)
        return {name: loss(logits, batch) for name, loss in self.loss_functions.items()}

    def predict(self, model: nn.Module, batch: Batch) -> DensePrediction:
        """The logits, and how salient each pixel of each truth is, from 0 to 1 in 255 steps."""
        logits = self._logits(model, batch).float()
        # In the steps of a PNG file, so that figures are those of the files, which is what others measure; and in
        # float64, as they do: a step stretched in float32 may fall below the threshold that it stands for.
        planes = at_truth(logits.detach().sigmoid(), batch)
        maps = [plane[0].clamp(0, 1).mul(255).round().double().div(255) for plane in planes]
        return DensePrediction(logits, maps)

    def metrics(self) -> Sequence[Metric]:
        """Losses at the size of the model's images, everything else at that of the truth."""
        return self._metrics

    def picture(self, batch: Batch, predictions: DensePrediction | None) -> Picture | None:
        """The first images with their truth and, if there is one, the prediction and how far it is off on average."""
        images, masks = viewable(batch["image"][:_PICTURED]), truths(batch)[:_PICTURED]
        rows = [[shaped(image, mask), grey(mask)] for image, mask in zip(images, masks, strict=True)]
        captions = [["image", "truth"] for _ in rows]
        if predictions is not None:
            pairs = zip(rows, captions, predictions.maps, masks, strict=False)
            for row, texts, found, mask in pairs:
                row.append(grey(found * 255))
                texts.append(f"prediction, off by {self._distance(found, mask):.3f}")
        return side_by_side(rows, captions)

    def glimpse(self, batch: Batch, predictions: DensePrediction) -> tuple[Batch, DensePrediction]:
        """All but the logits, which no picture shows."""
        return batch, predictions._replace(logits=predictions.logits[:, :0])

    def tables(self, figures: dict[str, Any]) -> dict[str, Picture]:
        """None."""
        return {}

    def maps(self, predictions: DensePrediction) -> list[Picture]:
        """What is saved of each sample: grey from 0 to 255, uint8 [H, W]."""
        return [(found * 255).round().cpu().numpy().astype(np.uint8) for found in predictions.maps]

    def _distance(self, found: Tensor, mask: Tensor) -> float:
        """What the metric calls MAE."""
        truth = mask.cpu().numpy() > 128
        return float(np.abs(prepared(found.cpu().numpy(), truth, self._stretch) - truth).mean())

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = main_output(ask(model, batch["image"]))
        if logits.shape[1] != 1:
            raise DataError(f"saliency: the model gives {logits.shape[1]} maps for an image, expected one")
        return resized(logits, batch["mask"].shape[-2:])
