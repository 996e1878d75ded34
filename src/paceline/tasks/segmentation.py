"""Semantic segmentation: the class of every pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.counting import counted
from paceline.core.errors import DataError, RecipeError
from paceline.core.palette import colour_of, colours_of
from paceline.core.picture import heat_map
from paceline.data.batch import Batch
from paceline.losses.term import Loss, Term
from paceline.metrics.loss import LossFigures
from paceline.metrics.segmentation import Segmentation as SegmentationFigures
from paceline.metrics.state import Metric
from paceline.models.asking import ask
from paceline.tasks.classification import viewable
from paceline.tasks.dense_pictures import shaped, side_by_side, tinted, with_legend
from paceline.tasks.dense_prediction import (
    DensePrediction,
    OfLogits,
    OfMaps,
    Views,
    at_truth,
    main_output,
    resized,
    truths,
)
from paceline.tasks.task import Picture

_PICTURED = 8
_NAMED = 32  # classes whose figures are told one by one
_AUXILIARY = "aux_"


class Segmentation:
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
        aux_weight: float = 0.0,
        flip: bool = False,
        scales: Sequence[float] = (1.0,),
        window: int | Sequence[int] | None = None,
        stride: int | Sequence[int] | None = None,
    ) -> None:
        if len(classes) < 2:
            raise DataError(
                f"segmentation: the masks have {counted(len(classes), 'class')}, expected two or more; name them as"
                " classes in data, or use task: saliency for masks that are binary"
            )
        self.loss_functions = dict(losses)
        self.weights = dict(weights)
        self.classes = list(classes)
        self.main_figure = "miou"
        self.palette = colours_of(classes[:256]) + [colour_of(number) for number in range(len(classes), 256)]
        names = self.classes if len(self.classes) <= _NAMED else None
        self._metrics: list[Metric] = [
            OfLogits(LossFigures(self.loss_functions, dict(weights))),
            OfMaps(SegmentationFigures(len(self.classes), ignore_index, names)),
            *(OfMaps(metric) for metric in extra_metrics),
        ]
        self._has_auxiliary = aux_weight > 0
        if self._has_auxiliary:
            self.weights |= {f"{_AUXILIARY}{name}": weight * aux_weight for name, weight in weights.items()}
        self._views = Views(flip, scales, _sides(window), _sides(stride))

    def counts(self, batch: Batch) -> dict[str, float | None]:
        """The denominator of each loss; that of an auxiliary head is the same."""
        own = {name: loss.count(batch) for name, loss in self.loss_functions.items()}
        return own | {f"{_AUXILIARY}{name}": count for name, count in own.items()} if self._has_auxiliary else own

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Term]:
        """Each loss of the model's logits [N, C, H, W], and of its auxiliary ones."""
        outputs, size = ask(model, batch["image"]), batch["mask"].shape[-2:]
        logits = self._checked(main_output(outputs))
        terms = {name: loss(resized(logits, size), batch) for name, loss in self.loss_functions.items()}
        if self._has_auxiliary:
            auxiliary = resized(_auxiliary(outputs), size)
            terms |= {f"{_AUXILIARY}{name}": loss(auxiliary, batch) for name, loss in self.loss_functions.items()}
        return terms

    def predict(self, model: nn.Module, batch: Batch) -> DensePrediction:
        """The logits, and the class of each pixel of each truth; where those are no numbers, that of no class."""
        logits = self._views(lambda images: self._checked(main_output(ask(model, images))), batch["image"])
        maps = [_best(planes) for planes in at_truth(logits.detach(), batch)]
        return DensePrediction(resized(logits, batch["mask"].shape[-2:]), maps)

    def metrics(self) -> Sequence[Metric]:
        """Losses at the size of the model's images, everything else at that of the truth."""
        return self._metrics

    def picture(self, batch: Batch, predictions: DensePrediction | None) -> Picture | None:
        """The first images, beside them tinted by their truth and by the prediction, if there is one, and a legend."""
        images, masks = viewable(batch["image"][:_PICTURED]), truths(batch)[:_PICTURED]
        seen, captions = [masks], ["image", "truth"]
        if predictions is not None:
            seen, captions = [*seen, predictions.maps[:_PICTURED]], [*captions, "prediction"]
        rows = [
            [shaped(image, each[0]), *(tinted(image, mask, self.classes) for mask in each)]
            for image, *each in zip(images, *seen, strict=True)
        ]
        return with_legend(side_by_side(rows, [captions] * len(rows)), self.classes, masks)

    def glimpse(self, batch: Batch, predictions: DensePrediction) -> tuple[Batch, DensePrediction]:
        """All but the logits, which no picture shows."""
        return batch, predictions._replace(logits=predictions.logits[:, :0])

    def tables(self, figures: dict[str, Any]) -> dict[str, Picture]:
        """The confusion matrix, in pixels."""
        if "confusion" not in figures:
            return {}
        matrix = np.asarray(figures["confusion"])
        return {"confusion": heat_map(matrix, self.classes, self.classes, "Confusion matrix, in pixels")}

    def maps(self, predictions: DensePrediction) -> list[Picture]:
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


def _sides(size: int | Sequence[int] | None) -> Sequence[int] | None:
    return (size, size) if isinstance(size, int) else size
