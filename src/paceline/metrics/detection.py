"""Average precision of detected boxes: COCO's twelve numbers, and PASCAL VOC's AP50."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.registry import register
from paceline.data.batch import TRUTHS, Batch
from paceline.metrics.metric import MetricValues, State

COCO_NAMES = (
    "ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large",
    "ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large",
)  # fmt: skip
_MAX_NAMED = 100  # classes whose AP is reported one by one
_IOU_50 = 0


class Objects(NamedTuple):
    """The objects of a split, one a row, in the order of the samples."""

    sample: NDArray[np.int64]
    boxes: NDArray[np.float64]
    """[K, 4] as x1 y1 x2 y2"""
    labels: NDArray[np.int64]
    scores: NDArray[np.float64]
    """Of detections."""
    crowd: NDArray[np.bool_]
    """Of ground truth: detections of it are neither right nor wrong."""
    area: NDArray[np.float64]
    masks: NDArray[np.object_]
    """Of each, its run lengths as {"size": [height, width], "counts": bytes}, or None where boxes are compared."""


def objects_state(predictions: Sequence[Any], batch: Batch) -> State:
    """The detections and the ground truth of a batch, as rows to be joined."""
    found, truth = [], []
    for index, (sample, own) in enumerate(zip(batch.ids.tolist(), predictions, strict=True)):
        number = len(own.boxes)
        columns = [torch.full((number, 1), sample), own.labels[:, None], own.scores[:, None], own.boxes]
        found.append(torch.cat([column.detach().cpu().double() for column in columns], 1))
        boxes, labels, *more = (truth_field(batch, name)[index] for name in ("boxes", "classes", "crowd", "area"))
        columns = [
            torch.full((len(boxes), 1), sample),
            labels[:, None],
            *(each[:, None] for each in more),
            boxes,
        ]
        truth.append(torch.cat([column.cpu().double() for column in columns], 1))
    return {"samples": batch.ids.cpu().double(), "detections": torch.cat(found), "truth": torch.cat(truth)}


def truth_field(batch: Batch, name: str) -> Sequence[Tensor]:
    """A field of objects as it was read, if the batch keeps that, else as transforms have left it."""
    found: Sequence[Tensor] = batch[TRUTHS[name] if TRUTHS[name] in batch else name]
    return found


def detection_rows(predictions: Sequence[Any], batch: Batch) -> Tensor:
    """All detections of a batch, float64 [K, 8]: sample, image id, label, score, x1, y1, x2, y2.

    The image id is that of the data set's files, or the number of the sample.
    """
    rows = objects_state(predictions, batch)["detections"]
    images = dict(zip(batch.ids.tolist(), batch.get("image_id", batch.ids).tolist(), strict=True))
    ids = torch.tensor([images[int(sample)] for sample in rows[:, 0].tolist()], dtype=torch.float64)
    return torch.cat([rows[:, :1], ids[:, None], rows[:, 1:]], 1)


def read_objects(rows: Tensor, is_truth: bool, masks: Sequence[dict[str, Any]] | None = None) -> Objects:
    """The objects that `objects_state` has made rows of, or their detections."""
    table = rows.numpy()
    none, runs = np.zeros(len(table)), np.full(len(table), None)
    runs[:] = masks
    return Objects(
        table[:, 0].astype(np.int64), table[:, -4:], table[:, 1].astype(np.int64),
        none if is_truth else table[:, 2],
        table[:, 2] > 0 if is_truth else none > 0,
        table[:, 3] if is_truth else none,
        runs,
    )  # fmt: skip


@register.metric("coco_ap")
class CocoAP:
    """COCO's average precision and recall of boxes, as pycocotools computes them; computed by faster-coco-eval.

    - "ap": the mean over IoU thresholds from 0.5 to 0.95 and over classes; "ap50" and "ap75" at one threshold;
      "ap_small", "ap_medium" and "ap_large" of objects below 32², between, and above 96² pixels.
    - "ar1", "ar10" and "ar100": average recall with so many detections in an image, and by size.
    - "ap.NAME": the AP of each class.
    A value without any object to measure it on is left out.
    - "precision" float64 [classes, 101]: the precision at each recall from 0 to 1, at IoU 0.5, and "num_objects" int64
      [classes]: the objects of each class.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = list(classes)
        self.higher_is_better = dict.fromkeys(coco_names(self.classes), True)

    def update(self, predictions: Sequence[Any], batch: Batch) -> State:
        return objects_state(predictions, batch)

    def compute(self, state: State) -> MetricValues:
        truth, found = read_objects(state["truth"], True), read_objects(state["detections"], False)
        return coco_values(state["samples"], self.classes, truth, found)


def coco_values(
    samples: Tensor, classes: Sequence[str], truth: Objects, found: Objects, prefix: str = ""
) -> MetricValues:
    """COCO's numbers of detections in samples [N], and the AP of each class; all names begin with `prefix`."""
    if not len(truth.sample):
        return {}
    evaluator = _evaluate(samples.long().tolist(), len(classes), truth, found)
    values = dict(zip(COCO_NAMES, map(float, evaluator.stats[:12]), strict=True))
    precision = evaluator.eval["precision"][:, :, :, 0, -1]  # [thresholds, recalls, classes]
    if len(classes) <= _MAX_NAMED:
        values |= {f"ap.{name}": _mean(precision[:, :, index]) for index, name in enumerate(classes)}
    at_50 = np.where(precision[_IOU_50] < 0, np.nan, precision[_IOU_50]).T.copy()  # [classes, recalls]
    num_objects = np.bincount(truth.labels[~truth.crowd], minlength=len(classes))
    tensors = {"precision": torch.from_numpy(at_50), "num_objects": torch.from_numpy(num_objects)}
    kept = {name: value for name, value in values.items() if value >= 0}
    return {f"{prefix}{name}": value for name, value in {**kept, **tensors}.items()}


def coco_names(classes: Sequence[str], prefix: str = "") -> list[str]:
    """The names of the numbers that `coco_values` gives."""
    named = classes if len(classes) <= _MAX_NAMED else []
    return [f"{prefix}{name}" for name in (*COCO_NAMES, *(f"ap.{name}" for name in named))]


@register.metric("voc_ap")
class VocAP:
    """PASCAL VOC's average precision at IoU 0.5: the area below the curve of precision, or with 11 points as in 2007.

    - "voc_ap50": the mean over classes; "voc_ap50.NAME": each class that has objects.
    """

    def __init__(self, classes: Sequence[str], eleven_points: bool = False) -> None:
        self.classes = list(classes)
        self._eleven_points = eleven_points
        named = self.classes if len(self.classes) <= _MAX_NAMED else []
        self.higher_is_better = dict.fromkeys(("voc_ap50", *(f"voc_ap50.{name}" for name in named)), True)

    def update(self, predictions: Sequence[Any], batch: Batch) -> State:
        return objects_state(predictions, batch)

    def compute(self, state: State) -> MetricValues:
        truth, found = read_objects(state["truth"], True), read_objects(state["detections"], False)
        values = {}
        for number, name in enumerate(self.classes):
            own = [_rows(objects, objects.labels == number) for objects in (truth, found)]
            if (~own[0].crowd).any():
                values[name] = self._average_precision(*own)
        if not values:
            return {}
        named = {f"voc_ap50.{name}": value for name, value in values.items()}
        mean = {"voc_ap50": sum(values.values()) / len(values)}
        return mean | {name: value for name, value in named.items() if name in self.higher_is_better}

    def _average_precision(self, truth: Objects, found: Objects) -> float:
        order = np.argsort(-found.scores, kind="stable")
        is_right, counts = _match(truth, _rows(found, order))
        right = np.cumsum(is_right[counts])
        recall = right / (~truth.crowd).sum()
        precision = right / np.arange(1, len(right) + 1)
        envelope = np.maximum.accumulate(precision[::-1])[::-1]
        if self._eleven_points:
            reached = [envelope[recall >= level - 1e-12] for level in np.linspace(0, 1, 11)]
            return float(sum(each[0] if len(each) else 0.0 for each in reached) / 11)
        steps = np.diff(np.concatenate([[0.0], recall]))
        return float((steps * envelope).sum())


def count_mistakes(predictions: Sequence[Any], batch: Batch, score: float) -> Tensor:
    """How many detections above a score are false, and how many objects are missed, of each image of a batch, [N]."""
    state = objects_state(predictions, batch)
    truth, found = read_objects(state["truth"], True), read_objects(state["detections"], False)
    return mistakes_in(batch.ids, truth, found, score)


def mistakes_in(samples: Tensor, truth: Objects, found: Objects, score: float) -> Tensor:
    """The same of objects in samples [N]."""
    found = _rows(found, found.scores > score)
    num_classes = 1 + max([0, *truth.labels.tolist(), *found.labels.tolist()])
    each_class = [each._replace(sample=each.sample * num_classes + each.labels) for each in (truth, found)]
    is_right, counts = _match(*each_class)
    false, right, expected = found.sample[counts & ~is_right], found.sample[is_right], truth.sample[~truth.crowd]
    ids = samples.tolist()
    return torch.tensor([(false == id_).sum() + (expected == id_).sum() - (right == id_).sum() for id_ in ids])


def _match(truth: Objects, found: Objects) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which detections are right, and which count at all; the most confident ones come first.

    A detection takes the object that it overlaps most. One of a difficult object does not count; a second one of the
    same object is wrong.
    """
    is_right, counts = np.zeros(len(found.sample), bool), np.ones(len(found.sample), bool)
    taken = np.zeros(len(truth.sample), bool)
    of_sample = {sample: np.flatnonzero(truth.sample == sample) for sample in np.unique(truth.sample)}
    for index, sample in enumerate(found.sample.tolist()):
        candidates = of_sample.get(sample)
        if candidates is None:
            continue
        overlaps = _overlaps(found, index, truth, candidates)
        best = int(overlaps.argmax())
        if overlaps[best] < 0.5:
            continue
        target = candidates[best]
        if truth.crowd[target]:
            counts[index] = False
        elif not taken[target]:
            is_right[index] = taken[target] = True
    return is_right, counts


def _overlaps(found: Objects, index: int, truth: Objects, candidates: NDArray[np.int64]) -> NDArray[np.float64]:
    """The IoU of a detection and objects: of their masks, if they have some."""
    if found.masks[index] is None:
        return _iou(found.boxes[index], truth.boxes[candidates])
    from faster_coco_eval.core import mask

    overlaps = mask.iou([found.masks[index]], truth.masks[candidates].tolist(), [0] * len(candidates))
    return np.asarray(overlaps[0], np.float64)


def _iou(box: NDArray[np.float64], boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    spans = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    inner = np.clip(spans, 0, None).prod(1)
    area, areas = (box[2:] - box[:2]).prod(), (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return np.asarray(inner / np.maximum(area + areas - inner, 1e-12))


def _rows(objects: Objects, which: NDArray[Any]) -> Objects:
    return Objects(*(column[which] for column in objects))


def _mean(precision: NDArray[np.float64]) -> float:
    known = precision[precision > -1]
    return float(known.mean()) if known.size else -1.0


def _evaluate(samples: list[int], num_classes: int, truth: Objects, found: Objects) -> Any:
    annotations = [
        {"id": number, "image_id": sample, "category_id": label, **place, "iscrowd": int(crowd), "area": area}
        for number, (sample, label, place, crowd, area) in enumerate(
            zip(*_columns(truth), truth.crowd.tolist(), truth.area.tolist(), strict=True), start=1
        )
    ]
    detections = [
        {"image_id": sample, "category_id": label, **place, "score": score}
        for sample, label, place, score in zip(*_columns(found), found.scores.tolist(), strict=True)
    ]
    kind = "bbox" if truth.masks[0] is None else "segm"
    pairs = (zip(each.sample.tolist(), each.masks, strict=True) for each in (truth, found))
    sizes = {sample: mask["size"] for sample, mask in chain(*pairs) if mask is not None}
    return evaluate_coco(samples, num_classes, annotations, detections, kind, sizes)


def evaluate_coco(
    images: Iterable[int],
    num_classes: int,
    truth: list[dict[str, Any]],
    found: list[dict[str, Any]],
    kind: str,
    sizes: Mapping[int, Sequence[int]] | None = None,
    **args: Any,
) -> Any:
    """faster-coco-eval's evaluator of COCO's annotations and results, with everything accumulated."""
    from faster_coco_eval import COCO, COCOeval_faster

    categories = [{"id": number} for number in range(num_classes)]
    rows = [
        {"id": each, **dict(zip(("height", "width"), (sizes or {}).get(each, ()), strict=False))} for each in images
    ]
    known = COCO({"images": rows, "categories": categories, "annotations": truth})
    evaluator = COCOeval_faster(known, known.loadRes(found), kind, **args)
    evaluator.run()
    return evaluator


def _columns(objects: Objects) -> tuple[list[int], list[int], list[dict[str, Any]]]:
    """Samples, labels, and what COCO compares: boxes as left, top, width and height, or masks."""
    boxes = np.concatenate([objects.boxes[:, :2], objects.boxes[:, 2:] - objects.boxes[:, :2]], 1)
    places = [
        {"bbox": box} if mask is None else {"segmentation": mask}
        for box, mask in zip(boxes.tolist(), objects.masks, strict=True)
    ]
    return objects.sample.tolist(), objects.labels.tolist(), places
