"""Semantic segmentation: the class of every pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Positive, Requires, Weight
from paceline.core.errors import ArgumentError, DataError, RecipeError
from paceline.core.registry import register
from paceline.core.text import pluralize
from paceline.data.argument_types import Size
from paceline.data.batch import Batch
from paceline.losses.loss_term import Loss, LossTerm
from paceline.metrics.metric import LossMetrics, Metric
from paceline.metrics.segmentation import Segmentation as SegmentationFigures
from paceline.models.forward import ask
from paceline.tasks.pixel_prediction import (
    OfLogits,
    OfMaps,
    PixelPrediction,
    Views,
    at_truth,
    main_output,
    resized,
    truths,
)
from paceline.tasks.task import Task
from paceline.visualize.colors import class_colors
from paceline.visualize.confusion_matrix import draw_confusion_matrix
from paceline.visualize.grid import Panel, class_legend
from paceline.visualize.image import Image, fit, to_image
from paceline.visualize.overlay import draw_label_map

_IMAGE_SIDE = 160
_NAMED = 32  # classes whose metrics are told one by one
_AUXILIARY = "aux_"


@register.task("segmentation", checks=[Requires("stride", "window")])
class Segmentation(Task):
    """Tells the class of every pixel, those aside whose mask is `ignore_index`.

    With an `aux_weight` the same losses, so weighted, are asked of the model's auxiliary head, and reported as
    `aux_…`. `flip`, `scales`, `window` and `stride` are how images are looked at in evaluation.
    """

    def __init__(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float],
        classes: Sequence[str],
        extra_metrics: Sequence[Metric] = (),
        ignore_index: int | None = 255,
        aux_weight: Weight = 0.0,
        flip: bool = False,
        scales: Annotated[Sequence[Positive], Field(min_length=1)] = (1.0,),
        window: Size | None = None,
        stride: Size | None = None,
    ) -> None:
        if len(classes) < 2:
            raise DataError(
                f"segmentation: the masks have {pluralize(len(classes), 'class')}, expected two or more; name them as"
                " classes in data, or use task: saliency for masks that are binary"
            )
        super().__init__(losses, weights, classes)
        self.main_metric = "miou"
        self.palette = class_colors(classes[:256], 256)
        names = self.classes if len(self.classes) <= _NAMED else None
        # Losses at the size of the model's images, everything else at that of the truth.
        self._metrics = [
            OfLogits(LossMetrics(self.loss_functions, dict(weights))),
            OfMaps(SegmentationFigures(len(self.classes), ignore_index, names)),
            *(OfMaps(metric) for metric in extra_metrics),
        ]
        self._has_auxiliary = aux_weight > 0
        if self._has_auxiliary:
            self.weights |= {f"{_AUXILIARY}{name}": weight * aux_weight for name, weight in weights.items()}
        self._views = Views(flip, scales, *_windows(window, stride))

    def counts(self, batch: Batch) -> dict[str, float | None]:
        """The denominator of each loss; that of an auxiliary head is the same."""
        own = super().counts(batch)
        return own | {f"{_AUXILIARY}{name}": count for name, count in own.items()} if self._has_auxiliary else own

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, LossTerm]:
        """Each loss of the model's logits [N, C, H, W], and of its auxiliary ones."""
        outputs, size = ask(model, batch["image"]), batch["mask"].shape[-2:]
        logits = self._checked(main_output(outputs))
        terms = {name: loss(resized(logits, size), batch) for name, loss in self.loss_functions.items()}
        if self._has_auxiliary:
            auxiliary = resized(_auxiliary(outputs), size)
            terms |= {f"{_AUXILIARY}{name}": loss(auxiliary, batch) for name, loss in self.loss_functions.items()}
        return terms

    def predict(self, model: nn.Module, batch: Batch) -> PixelPrediction:
        """The logits, and the class of each pixel of each truth; where those are no numbers, that of no class."""
        logits = self._views(lambda images: self._checked(main_output(ask(model, images))), batch["image"])
        maps = [_best(planes) for planes in at_truth(logits.detach(), batch)]
        return PixelPrediction(resized(logits, batch["mask"].shape[-2:]), maps)

    def draw(self, batch: Batch, predictions: PixelPrediction | None, index: int) -> list[Panel]:
        """Draw the image, and the classes of its mask and, if there is one, of the prediction blended over it."""
        maps = {"truth": truths(batch)[index]}
        if predictions is not None:
            maps["prediction"] = predictions.maps[index]
        # The image may have been cut or resized otherwise than the mask.
        image = fit(to_image(batch["image"][index]), _IMAGE_SIDE, maps["truth"].shape)
        panels = [Panel(image, "image")]
        for name, label_map in maps.items():
            ids = label_map.cpu().numpy()
            overlay = draw_label_map(image, ids, self.palette[: len(self.classes)])
            panels.append(Panel(overlay, name, legend=class_legend(ids, self.classes)))
        return panels

    def draw_metrics(self, metrics: dict[str, Any]) -> dict[str, Image]:
        """Draw the confusion matrix, in pixels."""
        if "confusion" not in metrics:
            return {}
        return {"confusion": draw_confusion_matrix(metrics["confusion"], self.classes, "Confusion matrix, in pixels")}

    def maps(self, predictions: PixelPrediction) -> list[Image]:
        """What is saved of each sample: the ids of classes, uint8 [H, W]."""
        return [found.clamp(max=255).to(torch.uint8).cpu().numpy() for found in predictions.maps]

    def _checked(self, logits: Tensor) -> Tensor:
        if logits.shape[1] != len(self.classes):
            expected = f"the data have {len(self.classes)} classes; take a model that gives one for each"
            raise RecipeError(f"model: gives {logits.shape[1]} maps for an image, {expected}")
        return logits


def _best(planes: Tensor) -> Tensor:
    best, numbers = planes.max(0)  # what is not a number is the greatest
    return numbers.masked_fill(best.isnan(), len(planes)).to(torch.int16)


def _auxiliary(outputs: Any) -> Tensor:
    if not isinstance(outputs, dict) or "aux" not in outputs:
        raise RecipeError("task.aux_weight: the model has no auxiliary head; leave it out, or give the model one")
    logits: Tensor = outputs["aux"]
    return logits


def _windows(window: Size | None, stride: Size | None) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    """Height and width of windows, and how far they are apart."""
    sizes, steps = ((each, each) if isinstance(each, int) else each for each in (window, stride))
    if sizes and steps and (steps[0] > sizes[0] or steps[1] > sizes[1]):
        found = f"windows of {list(sizes)} that are {list(steps)} apart leave gaps"
        raise ArgumentError("stride", f"{found}; give a smaller stride")
    return sizes, steps
