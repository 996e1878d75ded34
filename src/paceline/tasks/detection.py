"""Object detection: the boxes of objects, their classes, and how certain they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Share, Weight
from paceline.core.errors import ArgumentError, DataError, ExportError, RecipeError, TrainingError
from paceline.core.registry import register
from paceline.core.world import to_float64
from paceline.data.batch import Batch
from paceline.losses.loss_term import Count, LossTerm
from paceline.metrics.detection import CocoAP, count_mistakes, detection_rows, truth_field
from paceline.metrics.metric import Metric, Rows
from paceline.models.detector import Detections, Detector, Target, batched_nms
from paceline.models.model_errors import call_model
from paceline.tasks.task import Task, compare_by
from paceline.visualize.charts import Curve, draw_curves
from paceline.visualize.colors import class_color
from paceline.visualize.grid import Panel, class_legend
from paceline.visualize.image import Image, fit, to_image
from paceline.visualize.overlay import draw_boxes

_IMAGE_SIDE = 320
_DRAWN_SCORE, _MIN_DRAWN, _MAX_DRAWN = 0.3, 10, 20
_MAX_NAMED = 20  # boxes in an image: the names of more would cover each other
_MAX_CURVES = 9  # of classes, beside their mean: more are hard to tell apart


@register.task("detection")
class Detection(Task):
    """Detects the objects of an image. The model brings its losses; `loss_weights` weighs them by name."""

    main_metric = "ap50"
    original_size = True
    error_name = f"false and missed boxes at score {_DRAWN_SCORE}"

    def __init__(
        self,
        model: nn.Module,
        classes: Sequence[str],
        extra_metrics: Sequence[Metric] = (),
        loss_weights: Mapping[str, Weight] | None = None,
        flip: Annotated[bool, Field(description="Merges the detections of each image and its mirror image.")] = False,
        min_score: Annotated[Share | None, Field(description="Detections with a lower score are left out.")] = None,
    ) -> None:
        if not isinstance(model, Detector):
            raise RecipeError(
                f"model: {type(model).__name__} is not a detector; use fcos or torchvision/detection/NAME, or give your"
                " model `loss_names` and a forward(images, targets=None), as docs/detection.md describes"
            )
        given = dict(loss_weights or {})
        for name in given.keys() - set(model.loss_names):
            raise ArgumentError(
                "loss_weights", f"no loss is called {name!r}; the model has {', '.join(model.loss_names)}"
            )
        super().__init__({}, {name: given.get(name, 1.0) for name in model.loss_names}, classes)
        self._metrics = [CocoAP(self.classes), *extra_metrics]
        compare_by(rows_of_boxes, extra_metrics)
        self._count = getattr(model, "count", None)
        self._divisors: Callable[[Mapping[str, float]], Mapping[str, float]] | None = getattr(model, "divisors", None)
        self._selection = getattr(model, "selection", None)
        self._flip, self._min_score = flip, min_score
        if flip and self._selection is None:
            raise ArgumentError("flip", f"{type(model).__name__} has no `selection`, the thresholds to merge by")

    def counts(self, batch: Batch) -> dict[str, Count]:
        """What each loss is divided by, where that depends on the targets alone."""
        if self._count is None:
            return dict.fromkeys(self.weights)
        counts: dict[str, Count] = self._count(batch["image"], _targets(batch))
        return counts

    def divisors(self, counts: Mapping[str, float]) -> Mapping[str, float]:
        """The counts of the global batch, or what the model makes of them."""
        return counts if self._divisors is None else self._divisors(counts)

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, LossTerm]:
        parts = call_model(model, batch["image"], _targets(batch))
        if not isinstance(parts, Mapping) or not all(_is_fraction(parts.get(name)) for name in self.weights):
            names = ", ".join(f'"{name}": (total, count)' for name in self.weights)
            raise TrainingError(
                f"model: with targets, a detector returns each loss as a sum and a count: {{{names}}};"
                f" got {_describe(parts)}"
            )
        return {name: LossTerm(*parts[name]) for name in self.weights}

    def predict(self, model: nn.Module, batch: Batch) -> list[Detections]:
        """What is detected in each image, in pixels of the image as it was read."""
        found = _checked_detections(call_model(model, batch["image"]))
        if self._flip:
            flipped: list[Detections] = call_model(model, batch["image"].flip(-1))
            found = [self._merge(*pair, batch["image"].shape[-1]) for pair in zip(found, flipped, strict=True)]
        if self._min_score is not None:
            found = [_select(each, each.scores >= self._min_score) for each in found]
        return [each._replace(boxes=to_original(each.boxes, batch, index)) for index, each in enumerate(found)]

    def export_outputs(self, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """Boxes [N, P, 4] and their scores [N, P, classes], before the best ones are selected."""
        candidates: Callable[[Tensor], tuple[Tensor, Tensor]] | None = getattr(model, "candidates", None)
        if candidates is None:
            raise ExportError(
                f"{type(model).__name__} selects boxes inside the model, by the operator torchvision::nms, and graphs"
                " of any batch size cannot; export its weights with --format safetensors, or train fcos"
            )
        boxes, scores = candidates(images)
        return {"boxes": boxes, "scores": scores}

    def export_details(self) -> dict[str, Any]:
        return {"activation": None, "selection": self._selection}

    def draw(self, batch: Batch, predictions: list[Detections] | None, index: int) -> list[Panel]:
        """Draw the ground truth and, if there are any, the best detections: 10, or as many as there are objects."""
        image, truth = to_image(batch["image"][index]), batch["classes"][index]
        panel = self._panel(image, batch["boxes"][index], truth, None, "truth", _IMAGE_SIDE)
        if predictions is None:
            return [panel]
        best, caption = self._best(predictions[index], max(_MIN_DRAWN, len(truth)))
        boxes = to_image_pixels(best.boxes, batch, index)
        return [panel, self._panel(image, boxes, best.labels, best.scores, f"prediction, {caption}", _IMAGE_SIDE)]

    def sample_errors(self, predictions: list[Detections], batch: Batch) -> Tensor:
        """How many detections with a score above 0.3 are false, and how many objects are missed, of each image, [N]."""
        return count_mistakes(predictions, batch, _DRAWN_SCORE)

    def draw_prediction(self, image: Image, batch: Batch, predictions: list[Detections], index: int) -> Panel:
        """Draw the 20 best detections over the image as it was read, or all of them from `min_score` on."""
        best, caption = self._best(predictions[index], _MAX_DRAWN)
        return self._panel(image, best.boxes, best.labels, best.scores, caption, max(image.shape[:2]))

    def _best(self, found: Detections, most: int) -> tuple[Detections, str]:
        """The detections that are drawn, best first, and what is said of them."""
        least = _DRAWN_SCORE
        if self._min_score is not None:
            least, most = self._min_score, len(found.scores)
        certain = _select(found, found.scores >= least)
        best = _select(certain, certain.scores.argsort(descending=True, stable=True)[:most])
        num_drawn, number = len(best.scores), len(certain.scores)
        counted = f"{number}" if num_drawn == number else f"the {num_drawn} best of {number}"
        return best, f"{counted} with a score of {least:g} or more"

    def draw_metrics(self, metrics: dict[str, Any]) -> dict[str, Image]:
        """Draw the mean precision-recall curve at IoU 0.5, and those of frequent classes, colored as their boxes."""
        if "num_objects" not in metrics:
            return {}
        title, curves = precision_recall_curves(self.classes, metrics["precision"], metrics["num_objects"])
        colors = {name: class_color(index) for index, name in enumerate(self.classes)}
        return {"precision_recall": draw_curves(curves, title, "recall", "precision", colors=colors)} if curves else {}

    def detection_metric(self) -> Metric:
        return Rows("detections", detection_rows)

    def _merge(self, first: Detections, flipped: Detections, width: int) -> Detections:
        """The best detections of an image and its mirror image, without those that overlap a better one."""
        assert self._selection is not None
        left, top, right, bottom = flipped.boxes.unbind(1)
        boxes = torch.cat([first.boxes, torch.stack([width - right, top, width - left, bottom], 1)])
        scores, labels = torch.cat([first.scores, flipped.scores]), torch.cat([first.labels, flipped.labels])
        kept = batched_nms(boxes, scores, labels, self._selection["nms_thresh"])
        kept = kept[: self._selection["detections_per_img"]]
        return _select(Detections(boxes, scores, labels), kept)

    def _panel(
        self, image: Image, boxes: Tensor, labels: Tensor, scores: Tensor | None, caption: str, side: int
    ) -> Panel:
        """Boxes in the colors of their classes, and unless they are many with the names of these and their scores."""
        small, numbers = fit(image, side), labels.tolist()
        scale = small.shape[1] / image.shape[1]
        texts = [self.classes[number] if number < len(self.classes) else str(number) for number in numbers]
        if scores is not None:
            texts = [f"{text} {score:.2f}" for text, score in zip(texts, scores.tolist(), strict=True)]
        colors = [class_color(number) for number in numbers]
        labeled = texts if len(texts) <= _MAX_NAMED else ()
        drawn = draw_boxes(small, boxes.cpu().numpy() * scale, colors, labels=labeled)
        return Panel(drawn, caption, legend=class_legend(numbers, self.classes))


def precision_recall_curves(
    classes: Sequence[str], precision: Tensor, num_objects: Tensor
) -> tuple[str, dict[str, Curve]]:
    """What to draw of precision [classes, recalls], by name, and its title: the mean, and the most frequent classes."""
    known = [index for index in range(len(classes)) if not precision[index].isnan().any()]
    recall = torch.linspace(0, 1, precision.shape[1]).tolist()
    frequent = sorted(known, key=lambda index: -int(num_objects[index]))[:_MAX_CURVES]
    curves: dict[str, Curve] = {classes[index]: (recall, precision[index].tolist()) for index in frequent}
    if len(known) > 1:
        curves = {f"mean of {len(known)} classes": (recall, precision[known].mean(0).tolist()), **curves}
    which = f": the mean and the {_MAX_CURVES} most frequent classes" if len(known) > _MAX_CURVES else ""
    return f"Precision and recall at IoU 0.5{which}", curves


def _select(found: Detections, which: Tensor) -> Detections:
    return Detections(found.boxes[which], found.scores[which], found.labels[which])


def _targets(batch: Batch) -> list[Target]:
    """The objects of each image; crowds and difficult objects are not learned from."""
    if "boxes" not in batch:
        raise DataError("detection: these samples have no boxes; use a data set with boxes, such as voc, coco or yolo")
    if "classes" not in batch:
        raise DataError('detection: these samples have boxes but no labels; give "labels", the class of each box, too')
    fields = zip(batch["boxes"], batch["classes"], batch["crowd"], strict=True)
    return [_without_crowds(*each) for each in fields]


def _without_crowds(boxes: Tensor, labels: Tensor, crowd: Tensor) -> Target:
    if not crowd.any():
        return {"boxes": boxes, "labels": labels}
    kept = (~crowd).nonzero().flatten().to(boxes.device, non_blocking=True)
    return {"boxes": boxes[kept], "labels": labels[kept]}


def _checked_detections(found: Any) -> list[Detections]:
    if isinstance(found, list) and all(isinstance(each, Detections) for each in found):
        return found
    kinds = f"a list of {type(found[0]).__name__}" if isinstance(found, list) else type(found).__name__
    raise TrainingError(f"model: without targets, a detector returns a list of Detections; got {kinds}")


def _is_fraction(term: Any) -> bool:
    return isinstance(term, tuple | list) and len(term) == 2


def _describe(parts: Any) -> str:
    if not isinstance(parts, Mapping):
        return type(parts).__name__
    return ", ".join(
        f'"{name}": {"a pair" if _is_fraction(term) else type(term).__name__}' for name, term in parts.items()
    )


def rows_of_boxes(predictions: Sequence[Detections], batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """Of each image, detections [K, 6] as x1 y1 x2 y2 score label, and its objects [M, 5] as x1 y1 x2 y2 label."""
    found = [torch.cat([each.boxes, each.scores[:, None], each.labels[:, None]], 1) for each in predictions]
    fields = zip(*(truth_field(batch, name) for name in ("boxes", "classes", "crowd")), strict=True)
    return found, [torch.cat([boxes, labels[:, None]], 1)[~crowd] for boxes, labels, crowd in fields]


def to_original(boxes: Tensor, batch: Batch, index: int) -> Tensor:
    """Boxes [K, 4] of a sample's image, in pixels of the image as it was read if the batch knows how to get there."""
    return _map_boxes(boxes, to_float64(batch["matrix"][index])) if "matrix" in batch else boxes


def to_image_pixels(boxes: Tensor, batch: Batch, index: int) -> Tensor:
    """The way back: boxes of the image as it was read, in pixels of the batch's image."""
    if "matrix" not in batch:
        return boxes
    matrix = to_float64(batch["matrix"][index])
    linear = torch.linalg.inv(matrix[:, :2])
    return _map_boxes(boxes, torch.cat([linear, -linear @ matrix[:, 2:]], 1))


def _map_boxes(boxes: Tensor, matrix: Tensor) -> Tensor:
    corners = to_float64(boxes).view(-1, 2, 2) @ matrix[:, :2].T + matrix[:, 2]
    return torch.cat([corners.amin(1), corners.amax(1)], 1).to(boxes)
