"""Object detection: the boxes of objects, their classes, and how certain they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Share, Weight
from paceline.core.errors import ArgumentError, DataError, ExportError, RecipeError, TrainingError
from paceline.core.registry import register
from paceline.core.signatures import signature_of
from paceline.core.world import to_float64
from paceline.data.batch import Batch
from paceline.data.padding import flip_planes
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
from paceline.visualize.overlay import draw_boxes, draw_instances

_IMAGE_SIDE = 320
DRAWN_SCORE, _MIN_DRAWN, _MAX_DRAWN = 0.3, 10, 20
_MAX_NAMED = 20  # boxes in an image: the names of more would cover each other
_MAX_CURVES = 9  # of classes, beside their mean: more are hard to tell apart


class Drawn(NamedTuple):
    """Objects in pixels of an image."""

    boxes: Tensor
    labels: Tensor
    masks: NDArray[np.uint8] | None = None


@register.task("detection")
class Detection(Task):
    """Detects the objects of an image. The model brings its losses; `loss_weights` weighs them by name."""

    main_metric = "ap50"
    pads_images = True
    original_size = True
    error_name = f"false and missed boxes at score {DRAWN_SCORE}"
    needs_masks = False
    _detects: type[Any] = Detections

    def __init__(
        self,
        model: nn.Module,
        classes: Sequence[str],
        extra_metrics: Sequence[Metric] = (),
        loss_weights: Mapping[str, Weight] | None = None,
        flip: Annotated[bool, Field(description="Merges the detections of each image and its mirror image.")] = False,
        min_score: Annotated[Share | None, Field(description="Detections with a lower score are left out.")] = None,
    ) -> None:
        loss_names = self._loss_names(model)
        given = dict(loss_weights or {})
        for name in given.keys() - set(loss_names):
            raise ArgumentError("loss_weights", f"no loss is called {name!r}; the model has {', '.join(loss_names)}")
        super().__init__({}, {name: given.get(name, 1.0) for name in loss_names}, classes)
        self._metrics = [*self._own_metrics(), *extra_metrics]
        compare_by(rows_of_boxes, extra_metrics)
        self._count = getattr(model, "count", None)
        self._takes_sizes = "image_sizes" in signature_of(model.forward).parameters
        self._divisors: Callable[[Mapping[str, float]], Mapping[str, float]] | None = getattr(model, "divisors", None)
        self._selection = getattr(model, "selection", None)
        self._flip, self._min_score = flip, min_score
        if flip and self._selection is None:
            raise ArgumentError(
                "flip",
                f"{type(model).__name__} does not merge its detections by non-maximum suppression, so those of a mirror"
                " image cannot be merged either; leave out task.flip",
            )

    def _own_metrics(self) -> list[Metric]:
        return [CocoAP(self.classes)]

    def _loss_names(self, model: nn.Module) -> Sequence[str]:
        if not isinstance(model, Detector):
            raise RecipeError(
                f"model: {type(model).__name__} is not a detector; use fcos or torchvision/detection/NAME, or give your"
                " model `loss_names` and a forward(images, targets=None), as docs/detection.md describes"
            )
        if getattr(model, "predicts_masks", False):
            raise RecipeError(
                f"model: {type(model).__name__} learns from masks; use task: instance_segmentation, or a model of boxes"
            )
        if getattr(model, "predicts_keypoints", False):
            raise RecipeError(
                f"model: {type(model).__name__} learns from keypoints; use task: keypoint_detection, or a box model"
            )
        return model.loss_names

    def counts(self, batch: Batch) -> dict[str, Count]:
        """What each loss is divided by, where that depends on the targets alone."""
        if self._count is None:
            return dict.fromkeys(self.weights)
        counts: dict[str, Count] = self._count(batch["image"], self._targets(batch))
        return counts

    def divisors(self, counts: Mapping[str, float]) -> Mapping[str, float]:
        """The counts of the global batch, or what the model makes of them."""
        return counts if self._divisors is None else self._divisors(counts)

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, LossTerm]:
        parts = call_model(model, batch["image"], self._targets(batch), **self._sizes(batch))
        if not isinstance(parts, Mapping) or not all(_is_fraction(parts.get(name)) for name in self.weights):
            names = ", ".join(f'"{name}": (total, count)' for name in self.weights)
            raise TrainingError(
                f"model: with targets, a detector returns each loss as a sum and a count: {{{names}}};"
                f" got {_describe(parts)}"
            )
        return {name: LossTerm(*parts[name]) for name in self.weights}

    def _targets(self, batch: Batch) -> list[Target]:
        """The objects of each image; crowds and difficult objects are not learned from."""
        if "boxes" not in batch:
            raise DataError(
                "detection: these samples have no boxes; use a data set with boxes, such as voc, coco or yolo"
            )
        if "classes" not in batch:
            raise DataError(
                'detection: these samples have boxes but no labels; give "labels", the class of each box, too'
            )
        names = {"boxes": "boxes", "labels": "classes"} | ({"masks": "masks"} if self.needs_masks else {})
        columns = {name: batch[field] for name, field in names.items()}
        objects = zip(*columns.values(), strict=True)
        pairs = zip(batch["crowd"], objects, strict=True)
        return [_without_crowds(crowd, **dict(zip(columns, each, strict=True))) for crowd, each in pairs]

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        """What is detected in each image, in pixels of the image as it was read."""
        found = self._detect(model, batch)
        return [each._replace(boxes=to_original(each.boxes, batch, index)) for index, each in enumerate(found)]

    def _detect(self, model: nn.Module, batch: Batch) -> list[Any]:
        """What the model detects in each image of a batch, in its pixels."""
        images, sizes = batch["image"], batch.image_sizes
        found = _check_detections(call_model(model, images, **self._sizes(batch)), self._detects)
        if self._flip:
            flipped: list[Any] = call_model(model, flip_planes(images, sizes), **self._sizes(batch))
            widths = [width for _, width in sizes] if sizes else [images.shape[-1]] * len(images)
            found = [self._merge(*each) for each in zip(found, flipped, widths, strict=True)]
        if self._min_score is None:
            return found
        return [select(each, each.scores >= self._min_score) for each in found]

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

    def draw(self, batch: Batch, predictions: list[Any] | None, index: int) -> list[Panel]:
        """Draw the ground truth and, if there are any, the best detections: 10, or as many as there are objects."""
        image, truth = to_image(batch.image(index)), batch["classes"][index]
        panel = self._panel(image, self._truth_to_draw(batch, index), None, "truth", _IMAGE_SIDE)
        if predictions is None:
            return [panel]
        best, caption = self._best(predictions[index], max(_MIN_DRAWN, len(truth)))
        drawn = Drawn(to_image_pixels(best.boxes, batch, index), best.labels, self._masks_to_draw(best, batch, index))
        return [panel, self._panel(image, drawn, best.scores, f"prediction, {caption}", _IMAGE_SIDE)]

    def _truth_to_draw(self, batch: Batch, index: int) -> Drawn:
        return Drawn(batch["boxes"][index], batch["classes"][index])

    def _masks_to_draw(self, found: Any, batch: Batch | None = None, index: int = 0) -> NDArray[np.uint8] | None:
        """The masks of detections, in pixels of a batch's image, or without a batch of the image as it was read."""
        return None

    def sample_errors(self, predictions: list[Any], batch: Batch) -> Tensor:
        """How many detections with a score above 0.3 are false, and how many objects are missed, of each image, [N]."""
        return count_mistakes(predictions, batch, DRAWN_SCORE)

    def draw_prediction(self, image: Image, batch: Batch, predictions: list[Any], index: int) -> Panel:
        """Draw the 20 best detections over the image as it was read, or all of them from `min_score` on."""
        best, caption = self._best(predictions[index], _MAX_DRAWN)
        drawn = Drawn(best.boxes, best.labels, self._masks_to_draw(best))
        return self._panel(image, drawn, best.scores, caption, max(image.shape[:2]))

    def _best(self, found: Any, most: int) -> tuple[Any, str]:
        """The detections that are drawn, best first, and what is said of them."""
        least = DRAWN_SCORE
        if self._min_score is not None:
            least, most = self._min_score, len(found.scores)
        certain = select(found, found.scores >= least)
        best = select(certain, certain.scores.argsort(descending=True, stable=True)[:most])
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

    def _sizes(self, batch: Batch) -> dict[str, Any]:
        """The further argument of a model that takes `image_sizes`, where images are padded."""
        return {"image_sizes": batch.image_sizes} if self._takes_sizes and batch.image_sizes else {}

    def _merge(self, first: Any, flipped: Any, width: int) -> Any:
        """The best detections of an image and its mirror image, without those that overlap a better one."""
        assert self._selection is not None
        left, top, right, bottom = flipped.boxes.unbind(1)
        boxes = torch.cat([first.boxes, torch.stack([width - right, top, width - left, bottom], 1)])
        scores, labels = torch.cat([first.scores, flipped.scores]), torch.cat([first.labels, flipped.labels])
        joined = first._replace(boxes=boxes, scores=scores, labels=labels)
        if hasattr(first, "masks"):
            joined = joined._replace(masks=torch.cat([first.masks, flipped.masks.flip(-1)]))
        kept = batched_nms(boxes, scores, labels, self._selection["nms_thresh"])
        return select(joined, kept[: self._selection["detections_per_img"]])

    def _panel(self, image: Image, objects: Drawn, scores: Tensor | None, caption: str, side: int) -> Panel:
        """Boxes in the colors of their classes, and unless they are many with the names of these and their scores."""
        small, numbers = fit(image, side), objects.labels.tolist()
        scale = small.shape[1] / image.shape[1]
        texts = [self.classes[number] if number < len(self.classes) else str(number) for number in numbers]
        if scores is not None:
            texts = [f"{text} {score:.2f}" for text, score in zip(texts, scores.tolist(), strict=True)]
        colors = [class_color(number) for number in numbers]
        labeled = texts if len(texts) <= _MAX_NAMED else ()
        if objects.masks is not None:
            small = draw_instances(small, objects.masks, colors)
        drawn = draw_boxes(small, objects.boxes.cpu().numpy() * scale, colors, labels=labeled)
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


def select(found: Any, which: Tensor) -> Any:
    """Those of an image's detections that a mask or indices say, with all that is known of them."""
    chosen: dict[str, Any] = {
        name: value[which] for name, value in found._asdict().items() if isinstance(value, Tensor)
    }
    if hasattr(found, "runs"):
        chosen["runs"] = [found.runs[index] for index in torch.arange(len(found.runs))[which.cpu()].tolist()]
    return found._replace(**chosen)


def _without_crowds(crowd: Tensor, **fields: Tensor) -> Target:
    if crowd.any():
        kept = (~crowd).nonzero().flatten().to(fields["boxes"].device, non_blocking=True)
        fields = {name: value[kept] for name, value in fields.items()}
    return cast("Target", fields)


def _check_detections(found: Any, expected: type[Any]) -> list[Any]:
    if isinstance(found, list) and all(isinstance(each, expected) for each in found):
        return found
    kinds = f"a list of {type(found[0]).__name__}" if isinstance(found, list) else type(found).__name__
    raise TrainingError(f"model: without targets, a detector returns a list of {expected.__name__}; got {kinds}")


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
