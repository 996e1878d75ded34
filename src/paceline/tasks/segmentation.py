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
from paceline.losses.loss_term import Count, Loss, LossTerm
from paceline.metrics.metric import Metric
from paceline.metrics.segmentation import Segmentation as SegmentationMetric
from paceline.models.model_errors import call_model
from paceline.tasks.pixel_prediction import (
    TTA,
    PixelPrediction,
    main_output,
    pixel_metrics,
    resize,
    truths,
    warp_to_truth,
)
from paceline.tasks.task import Task
from paceline.visualize.colors import class_colors
from paceline.visualize.confusion_matrix import draw_confusion_matrix
from paceline.visualize.grid import Panel, class_legend
from paceline.visualize.image import Image, fit, to_image
from paceline.visualize.overlay import draw_label_map

_IMAGE_SIDE = 160
_MAX_REPORTED = 32  # classes whose IoU is reported one by one
_AUX = "aux_"


@register.task("segmentation", checks=[Requires("stride", "window")])
class Segmentation(Task):
    """Semantic segmentation: the class of every pixel whose mask is not `ignore_index`.

    With `aux_weight`, the model's auxiliary head has the same losses, with that weight, logged as `aux_…`. `flip`,
    `scales`, `window` and `stride` are test-time augmentation.
    """

    main_metric = "miou"
    pads_images = True
    error_name = "share of wrong pixels"
    training_metrics = ("pixel_accuracy",)
    activation = "softmax"

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
                f"segmentation: the masks have {pluralize(len(classes), 'class')}, expected two or more; list them as"
                " `classes` of the data set, or use task: saliency for binary masks"
            )
        super().__init__(losses, weights, classes)
        self._ignore_index = ignore_index
        self.palette = class_colors(classes[:256], 256)
        names = self.classes if len(self.classes) <= _MAX_REPORTED else None
        self._metrics = pixel_metrics(
            self, [SegmentationMetric(len(self.classes), ignore_index, names), *extra_metrics]
        )
        self._has_aux = aux_weight > 0
        if self._has_aux:
            self.weights = self.weights | {f"{_AUX}{name}": weight * aux_weight for name, weight in weights.items()}
        self._tta = TTA(flip, scales, *_window_sizes(window, stride))

    def counts(self, batch: Batch) -> dict[str, Count]:
        """The denominator of each loss; an auxiliary head has the same."""
        own = super().counts(batch)
        return own | {f"{_AUX}{name}": count for name, count in own.items()} if self._has_aux else own

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, LossTerm]:
        outputs, size = call_model(model, batch["image"]), batch["mask"].shape[-2:]
        logits = self._check(main_output(outputs))
        terms = {name: loss(resize(logits, size), batch) for name, loss in self.loss_functions.items()}
        if self._has_aux:
            aux = resize(_aux_output(outputs), size)
            terms |= {f"{_AUX}{name}": loss(aux, batch) for name, loss in self.loss_functions.items()}
        return self.training_terms(resize(logits.detach(), size), batch) | terms

    def training_terms(self, outputs: Tensor, batch: Batch) -> dict[str, LossTerm]:
        """The share of labeled pixels whose class is right."""
        masks = batch["mask"]
        is_labeled = masks != (-1 if self._ignore_index is None else self._ignore_index)
        if (is_inside := batch.is_inside()) is not None:
            is_labeled &= is_inside
        correct = (outputs.argmax(1) == masks) & is_labeled
        return {"pixel_accuracy": LossTerm(correct.sum().float(), is_labeled.sum().float())}

    def predict(self, model: nn.Module, batch: Batch) -> PixelPrediction:
        """The logits, and the class ids [H, W] at the size of each truth; `num_classes` where logits are NaN."""
        logits = self._tta.predict(lambda images: self._check(main_output(call_model(model, images))), batch)
        maps = [_best(planes) for planes in warp_to_truth(logits.detach(), batch)]
        return PixelPrediction(resize(logits, batch["mask"].shape[-2:]), maps)

    def draw(self, batch: Batch, predictions: PixelPrediction | None, index: int) -> list[Panel]:
        """Draw the image, and the classes of its mask and, if there is one, of the prediction blended over it."""
        maps = {"truth": truths(batch)[index]}
        if predictions is not None:
            maps["prediction"] = predictions.maps[index]
        # The aspect ratio of the image may differ from that of the mask.
        image = fit(to_image(batch.image(index)), _IMAGE_SIDE, maps["truth"].shape)
        panels = [Panel(image, "image")]
        return panels + [self._panel(image, label_map, name) for name, label_map in maps.items()]

    def sample_errors(self, predictions: PixelPrediction, batch: Batch) -> Tensor:
        """The share of each sample's labeled pixels whose class is wrong, [N]."""
        shares = []
        for found, mask in zip(predictions.maps, truths(batch), strict=True):
            truth = mask.to(found.device)
            is_labeled = truth != (-1 if self._ignore_index is None else self._ignore_index)
            shares.append(((found != truth) & is_labeled).sum() / is_labeled.sum().clamp(min=1))
        return torch.stack(shares)

    def draw_prediction(self, image: Image, batch: Batch, predictions: PixelPrediction, index: int) -> Panel:
        """Draw the predicted classes blended over the image."""
        return self._panel(image, predictions.maps[index])

    def _panel(self, image: Image, label_map: Tensor, caption: str = "") -> Panel:
        ids = label_map.cpu().numpy()
        overlay = draw_label_map(image, ids, self.palette[: len(self.classes)])
        return Panel(overlay, caption, legend=class_legend(ids, self.classes))

    def export_outputs(self, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """Logits [N, classes, H, W] at the size of the images, without test-time augmentation."""
        return {"logits": resize(self._check(main_output(model(images))), images.shape[-2:])}

    def draw_metrics(self, metrics: dict[str, Any]) -> dict[str, Image]:
        if "confusion" not in metrics:
            return {}
        return {"confusion": draw_confusion_matrix(metrics["confusion"], self.classes, "Confusion matrix, in pixels")}

    def maps(self, predictions: PixelPrediction) -> list[Image]:
        """The file of each sample: class ids, uint8 [H, W]."""
        return [found.clamp(max=255).to(torch.uint8).cpu().numpy() for found in predictions.maps]

    def _check(self, logits: Tensor) -> Tensor:
        if logits.shape[1] != len(self.classes):
            expected = f"the data have {len(self.classes)} classes; use a model with one map per class"
            raise RecipeError(f"model: outputs {logits.shape[1]} maps per image, {expected}")
        return logits


def _best(planes: Tensor) -> Tensor:
    best, class_ids = planes.max(0)  # NaN is the greatest
    return class_ids.masked_fill(best.isnan(), len(planes)).to(torch.int16)


def _aux_output(outputs: Any) -> Tensor:
    if not isinstance(outputs, dict) or "aux" not in outputs:
        raise RecipeError("task.aux_weight: the model has no auxiliary head; remove the key, or set aux: true in model")
    logits: Tensor = outputs["aux"]
    return logits


def _window_sizes(window: Size | None, stride: Size | None) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    """Window and stride as height and width."""
    sizes, strides = ((each, each) if isinstance(each, int) else each for each in (window, stride))
    if sizes and strides and (strides[0] > sizes[0] or strides[1] > sizes[1]):
        raise ArgumentError("stride", f"{list(strides)} leaves gaps between windows of {list(sizes)}; reduce it")
    return sizes, strides
