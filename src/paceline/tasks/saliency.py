"""Salient object detection: a map of how salient each pixel is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.world import to_float64
from paceline.data.batch import Batch
from paceline.data.padding import flip_planes
from paceline.losses.loss_term import Loss, LossTerm
from paceline.metrics.metric import Metric
from paceline.metrics.saliency import Saliency as SaliencyMetric
from paceline.metrics.saliency import normalize_map
from paceline.models.model_errors import call_model
from paceline.tasks.classification import average_logits
from paceline.tasks.pixel_prediction import PixelPrediction, main_output, pixel_metrics, resize, truths, warp_to_truth
from paceline.tasks.task import Task, compare_by
from paceline.visualize.colors import class_color
from paceline.visualize.grid import Panel
from paceline.visualize.image import Image, fit, to_image, to_rgb
from paceline.visualize.overlay import draw_mask

_IMAGE_SIDE = 160


@register.task("saliency")
class Saliency(Task):
    """Salient object detection: maps from 0 to 1, trained on masks from 0 to 255.

    All saliency metrics are computed, or those that the recipe selects in its own metric `saliency`.
    """

    palette = None
    """Saved maps are gray."""
    pads_images = True
    original_size = True
    main_metric = "max_f"
    error_name = "mean absolute error"
    training_metrics = ("mae",)
    activation = "sigmoid"

    def __init__(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float],
        classes: Sequence[str],
        extra_metrics: Sequence[Metric] = (),
        flip: Annotated[bool, Field(description="Averages the maps of each image and its mirror image.")] = False,
    ) -> None:
        if len(classes) > 1:
            raise DataError(f"saliency: the masks have {len(classes)} classes, expected one; set binary: true in data")
        super().__init__(losses, weights, classes)
        self._flip = flip
        selected = [metric for metric in extra_metrics if isinstance(metric, SaliencyMetric)]
        map_metrics = extra_metrics if selected else [SaliencyMetric(), *extra_metrics]
        self._stretch = selected[0].stretch if selected else True
        compare_by(_with_shares, (*losses.values(), *extra_metrics))
        self._metrics = pixel_metrics(self, map_metrics)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits [N, 1, H, W] at the size of the masks."""
        logits = main_output(call_model(model, batch["image"]))
        if logits.shape[1] != 1:
            raise DataError(f"saliency: the model outputs {logits.shape[1]} maps per image, expected one")
        return resize(logits, batch["mask"].shape[-2:])

    def training_terms(self, outputs: Tensor, batch: Batch) -> dict[str, LossTerm]:
        """The mean absolute error at the size of the masks."""
        errors = (outputs.detach().float().sigmoid().squeeze(1) - batch["mask"].float() / 255).abs()
        if (sizes := batch.image_sizes) is None:
            return {"mae": LossTerm(errors.sum(), float(errors.numel()))}
        return {"mae": LossTerm((errors * batch.is_inside()).sum(), float(sum(map(math.prod, sizes))))}

    def predict(self, model: nn.Module, batch: Batch) -> PixelPrediction:
        """The logits, and a map from 0 to 1 at the size of each truth, in the 256 levels of a PNG file."""
        logits = self.forward(model, batch).float()
        if self._flip:
            images = flip_planes(batch["image"], batch.image_sizes)
            flipped = flip_planes(self.forward(model, Batch(batch, image=images)).float(), batch.image_sizes)
            logits = average_logits(torch.stack([logits, flipped], 1), multi_label=True)
        # With these levels, metrics are equal to those measured on the saved files. In float32 a stretched level may
        # fall below its threshold, so maps are float64.
        planes = warp_to_truth(logits.detach().sigmoid(), batch)
        maps = [to_float64(plane[0].clamp(0, 1).mul(255).round()).div(255) for plane in planes]
        return PixelPrediction(logits, maps)

    def draw(self, batch: Batch, predictions: PixelPrediction | None, index: int) -> list[Panel]:
        """Draw the image, its mask and, if there is one, the prediction with its error."""
        mask = truths(batch)[index]
        image = fit(to_image(batch.image(index)), _IMAGE_SIDE, mask.shape)  # the aspect ratio may differ
        panels = [Panel(image, "image"), Panel(_draw_map(mask), "truth")]
        if predictions is not None:
            found = predictions.maps[index]
            panels.append(Panel(_draw_map(found * 255), f"prediction, MAE {self._mae(found, mask):.3f}"))
        return panels

    def sample_errors(self, predictions: PixelPrediction, batch: Batch) -> Tensor:
        """The mean absolute error of each map, [N]."""
        pairs = zip(predictions.maps, truths(batch), strict=True)
        return torch.tensor([self._mae(found, mask) for found, mask in pairs])

    def draw_prediction(self, image: Image, batch: Batch, predictions: PixelPrediction, index: int) -> Panel:
        """Draw the salient pixels blended over the image."""
        return Panel(draw_mask(image, predictions.maps[index].cpu().numpy(), class_color(0)))

    def export_outputs(self, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """Logits [N, 1, H, W] at the size of the images."""
        return {"logits": resize(main_output(model(images)), images.shape[-2:])}

    def maps(self, predictions: PixelPrediction) -> list[Image]:
        """The file of each sample: gray from 0 to 255, uint8 [H, W]."""
        return [(found * 255).round().cpu().numpy().astype(np.uint8) for found in predictions.maps]

    def _mae(self, found: Tensor, mask: Tensor) -> float:
        truth = mask.cpu().numpy() > 128
        return float(np.abs(normalize_map(found.cpu().numpy(), truth, self._stretch) - truth).mean())


def _with_shares(outputs: Any, batch: Batch) -> tuple[Any, Any]:
    """The outputs beside masks from 0 to 1; of masks of different sizes, a list."""
    masks = batch.target
    return outputs, [mask * (1 / 255) for mask in masks] if isinstance(masks, list) else masks * (1 / 255)


def _draw_map(values: Tensor) -> Image:
    """Values [H, W] from 0 to 255 in shades of gray."""
    return fit(to_rgb(values.cpu().numpy().astype(np.uint8)[..., None]), _IMAGE_SIDE)
