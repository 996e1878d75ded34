"""Average precision of masks, against pycocotools."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from paceline.data.batch import Batch
from paceline.metrics.detection import COCO_NAMES, CocoAP, mistakes_in
from paceline.metrics.instances import CocoMaskAP, EncodedInstances, instances_state, masked_objects
from paceline.metrics.metric import merge_states

CLASSES = ["a", "b", "c", "unseen"]
Case = list[tuple[list[EncodedInstances], Batch]]


def random_mask(random: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """An ellipse with a bite taken out."""
    down, across = np.mgrid[:height, :width]
    middle, radii = random.uniform(0, 1, 2) * [height, width], np.exp(random.uniform(1, 4.2, 2))
    inside = ((down - middle[0]) / radii[0]) ** 2 + ((across - middle[1]) / radii[1]) ** 2 < 1
    inside &= ~((across > middle[1]) & (down > middle[0]))
    mask: NDArray[np.uint8] = inside.astype(np.uint8)
    return mask


def box_of(mask: NDArray[np.uint8]) -> list[float]:
    left, top, width, height = coco_mask.toBbox(coco_mask.encode(np.asfortranarray(mask)))
    return [left, top, left + width, top + height]


def random_case(seed: int, images: int = 24, per_batch: int = 5) -> Case:
    """Objects of all sizes in images of several sizes, some of them crowds; detections near and far from them."""
    random = np.random.default_rng(seed)
    batches: Case = []
    for start in range(0, images, per_batch):
        ids = range(start, min(start + per_batch, images))
        fields: dict[str, Any] = {name: [] for name in ("boxes", "classes", "crowd", "area", "masks")}
        found = []
        for _ in ids:
            height, width = random.integers(60, 200, 2).tolist()
            number = int(random.integers(0, 6))
            masks = np.array([random_mask(random, height, width) for _ in range(number)], np.uint8)
            masks = masks.reshape(number, height, width)
            labels = random.integers(0, 3, number)
            shifted = [np.roll(mask, random.integers(-4, 5, 2), (0, 1)) for mask in np.repeat(masks, 2, 0)]
            own = np.array([*shifted, *(random_mask(random, height, width) for _ in range(3))], np.uint8)
            names = np.concatenate([np.repeat(labels, 2), random.integers(0, 3, 3)])
            scores = (random.integers(0, 30, len(own)) / 30).astype(np.float32)
            values = {"boxes": np.array([box_of(mask) for mask in masks], np.float32).reshape(-1, 4), "classes": labels}
            values |= {"crowd": random.random(number) < 0.2, "masks": masks}
            values["area"] = (masks.sum((1, 2)) * random.uniform(0.9, 1, number)).astype(np.float32)
            for name, value in values.items():
                fields[name].append(torch.from_numpy(value))
            runs = [coco_mask.encode(np.asfortranarray(mask))["counts"] for mask in own]
            boxes = torch.tensor([box_of(mask) for mask in own], dtype=torch.float32)
            found.append(
                EncodedInstances(boxes, torch.from_numpy(scores), torch.from_numpy(names), runs, (height, width))
            )
        batches.append((found, Batch({"id": torch.tensor(list(ids)), **fields})))
    return batches


def _extent(box: list[float]) -> list[float]:
    return [*box[:2], box[2] - box[0], box[3] - box[1]]


def coco_stats(case: Case, kind: str) -> list[float]:
    """The twelve numbers, as pycocotools computes them."""
    annotations: list[dict[str, Any]] = []
    results, images = [], []
    for found, batch in case:
        for index, image in enumerate(batch.ids.tolist()):
            masks, own = batch["masks"][index].numpy(), found[index]
            images.append({"id": image, "height": own.size[0], "width": own.size[1]})
            fields = (batch[name][index].tolist() for name in ("boxes", "classes", "crowd", "area"))
            for mask, box, label, crowd, area in zip(masks, *fields, strict=True):
                runs = coco_mask.encode(np.asfortranarray(mask))
                row = {"id": len(annotations) + 1, "image_id": image, "category_id": label, "segmentation": runs}
                annotations.append({**row, "bbox": _extent(box), "area": area, "iscrowd": int(crowd)})
            for box, score, label, runs in zip(
                own.boxes.tolist(), own.scores.tolist(), own.labels.tolist(), own.runs, strict=True
            ):
                row = {"image_id": image, "category_id": label, "score": score}
                place = {"segmentation": {"size": list(own.size), "counts": runs}}
                results.append(row | (place if kind == "segm" else {"bbox": _extent(box)}))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        categories = [{"id": number} for number in range(len(CLASSES))]
        truth.dataset = {"images": images, "annotations": annotations, "categories": categories}
        truth.createIndex()
        evaluator = COCOeval(truth, truth.loadRes(results), kind)
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    return [float(value) for value in evaluator.stats]


def compute(metric: CocoAP | CocoMaskAP, case: Case) -> dict[str, Any]:
    return metric.compute(merge_states(metric.update(*batch) for batch in case))


@pytest.mark.parametrize("seed", range(3))
def test_the_numbers_of_masks_and_boxes_are_those_of_pycocotools(seed: int) -> None:
    case = random_case(seed)
    for metric, prefix, kind in ((CocoMaskAP(CLASSES), "mask_", "segm"), (CocoAP(CLASSES), "", "bbox")):
        values = compute(metric, case)
        found = [values.get(f"{prefix}{name}", -1) for name in COCO_NAMES]
        assert found == pytest.approx(coco_stats(case, kind), abs=1e-9)
        assert 0.1 < values[f"{prefix}ap50"] < 0.95
        by_class = [values[f"{prefix}ap.{name}"] for name in "abc"]
        assert values[f"{prefix}ap"] == pytest.approx(np.mean(by_class))
        assert f"{prefix}ap.unseen" not in values
        assert values.keys() <= {*metric.higher_is_better, f"{prefix}precision", f"{prefix}num_objects"}


def test_the_size_of_batches_does_not_matter() -> None:
    metric = CocoMaskAP(CLASSES)
    whole, parts = (compute(metric, random_case(0, per_batch=size)) for size in (24, 5))
    names = [f"mask_{name}" for name in COCO_NAMES]
    assert {name: whole.get(name) for name in names} == {name: parts.get(name) for name in names}


def test_nothing_detected_and_nothing_to_detect() -> None:
    ((found, batch),) = random_case(0, images=1)
    none = [
        each._replace(boxes=each.boxes[:0], scores=each.scores[:0], labels=each.labels[:0], runs=[]) for each in found
    ]
    assert compute(CocoMaskAP(CLASSES), [(none, batch)])["mask_ap"] == 0
    empty = {name: [value[:0] for value in batch[name]] for name in ("boxes", "classes", "crowd", "area", "masks")}
    assert compute(CocoMaskAP(CLASSES), [(found, Batch({"id": batch.ids, **empty}))]) == {}


def test_mistakes_are_counted_by_masks() -> None:
    """The box of the second detection is that of its object; its mask is not."""
    size = (20, 20)
    square, frame = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    square[2:18, 2:18], frame[2:18, 2:18] = 1, 1
    frame[4:16, 4:16] = 0
    box = torch.tensor([[2.0, 2, 18, 18]])
    fields: dict[str, Any] = {"boxes": [box], "classes": [torch.tensor([1])], "crowd": [torch.tensor([False])]}
    fields |= {"area": [torch.tensor([256.0])], "masks": [torch.from_numpy(square[None])]}
    batch = Batch({"id": torch.tensor([3]), **fields})
    for mask, expected in ((square, 0), (frame, 2)):
        runs = [coco_mask.encode(np.asfortranarray(mask))["counts"]]
        found = [EncodedInstances(box, torch.tensor([0.9]), torch.tensor([1]), runs, size)]
        truth, detected = masked_objects(instances_state(found, batch))
        assert mistakes_in(batch.ids, truth, detected, 0.3).tolist() == [expected]
