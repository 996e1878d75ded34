"""Salient objects: how much each pixel belongs to what an image is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor, nn

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.losses.adapter import Criterion
from paceline.losses.loss_term import Loss
from paceline.metrics.adapter import MetricAdapter
from paceline.metrics.metric import LossMetrics, Metric
from paceline.metrics.saliency import Saliency as SaliencyFigures
from paceline.metrics.saliency import normalize_map
from paceline.models.forward import ask
from paceline.tasks.pixel_prediction import OfLogits, OfMaps, PixelPrediction, at_truth, main_output, resized, truths
from paceline.tasks.task import Task
from paceline.visualize.grid import Panel
from paceline.visualize.image import Image, fit, to_image, to_rgb

_IMAGE_SIDE = 160


@register.task("saliency")
class Saliency(Task):
    """Finds the salient objects of an image: a map from 0 to 1 beside a mask from 0 to 255.

    All metrics of saliency are measured, or those that the recipe chooses by naming the metric itself.
    """

    palette = None
    """Saved maps are gray."""

    def __init__(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float],
        classes: Sequence[str],
        extra_metrics: Sequence[Metric] = (),
    ) -> None:
        if len(classes) > 1:
            raise DataError(f"saliency: the masks have {len(classes)} classes, expected one; set binary: true in data")
        super().__init__(losses, weights, classes)
        self.main_metric = "max_f"
        chosen = [metric for metric in extra_metrics if isinstance(metric, SaliencyFigures)]
        measured = extra_metrics if chosen else [SaliencyFigures(), *extra_metrics]
        self._stretch = chosen[0].stretch if chosen else True
        for part in (*losses.values(), *extra_metrics):
            if isinstance(part, Criterion | MetricAdapter):
                part.target_scale = 1 / 255
        # Losses at the size of the model's images, everything else at that of the truth.
        self._metrics = [
            OfLogits(LossMetrics(self.loss_functions, self.weights)),
            *(OfMaps(metric) for metric in measured),
        ]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits [N, 1, H, W] at the size of the masks."""
        logits = main_output(ask(model, batch["image"]))
        if logits.shape[1] != 1:
            raise DataError(f"saliency: the model gives {logits.shape[1]} maps for an image, expected one")
        return resized(logits, batch["mask"].shape[-2:])

    def predict(self, model: nn.Module, batch: Batch) -> PixelPrediction:
        """The logits, and how salient each pixel of each truth is, from 0 to 1 in 255 steps."""
        logits = self.forward(model, batch).float()
        # In the steps of a PNG file, so that metrics are those of the files, which is what others measure; and in
        # float64, as they do: a step stretched in float32 may fall below the threshold that it stands for.
        planes = at_truth(logits.detach().sigmoid(), batch)
        maps = [plane[0].clamp(0, 1).mul(255).round().double().div(255) for plane in planes]
        return PixelPrediction(logits, maps)

    def draw(self, batch: Batch, predictions: PixelPrediction | None, index: int) -> list[Panel]:
        """Draw the image, its mask and, if there is one, the prediction with its error."""
        mask = truths(batch)[index]
        image = fit(to_image(batch["image"][index]), _IMAGE_SIDE, mask.shape)  # may have been resized otherwise
        panels = [Panel(image, "image"), Panel(_draw_map(mask), "truth")]
        if predictions is not None:
            found = predictions.maps[index]
            panels.append(Panel(_draw_map(found * 255), f"prediction, MAE {self._error(found, mask):.3f}"))
        return panels

    def maps(self, predictions: PixelPrediction) -> list[Image]:
        """What is saved of each sample: gray from 0 to 255, uint8 [H, W]."""
        return [(found * 255).round().cpu().numpy().astype(np.uint8) for found in predictions.maps]

    def _error(self, found: Tensor, mask: Tensor) -> float:
        """Return the MAE of one map, as the metric computes it."""
        truth = mask.cpu().numpy() > 128
        return float(np.abs(normalize_map(found.cpu().numpy(), truth, self._stretch) - truth).mean())


def _draw_map(values: Tensor) -> Image:
    """Return values from 0 to 255, [H, W], in shades of gray."""
    return fit(to_rgb(values.cpu().numpy().astype(np.uint8)[..., None]), _IMAGE_SIDE)
