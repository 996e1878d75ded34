"""Average precision, against pycocotools and against loops over all thresholds."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from paceline.data.batch import Batch
from paceline.metrics.detection import COCO_NAMES, CocoAP, VocAP
from paceline.metrics.metric import merge_states
from paceline.models.detector import Detections

CLASSES = ["a", "b", "c", "unseen"]
Case = list[tuple[list[Detections], Batch]]


def random_boxes(random: np.random.Generator, number: int) -> np.ndarray[Any, Any]:
    corners, spans = random.uniform(0, 300, (number, 2)), np.exp(random.uniform(1.5, 5.5, (number, 2)))
    return np.concatenate([corners, corners + spans], 1).astype(np.float32)


def random_case(seed: int, images: int = 50, per_batch: int = 7) -> Case:
    """Objects of all sizes, some of them crowds; detections near and far from them, with many equal scores."""
    random = np.random.default_rng(seed)
    batches: Case = []
    for start in range(0, images, per_batch):
        ids = range(start, min(start + per_batch, images))
        fields: dict[str, Any] = {name: [] for name in ("boxes", "classes", "crowd", "area")}
        found = []
        for image in ids:
            boxes = random_boxes(random, int(random.integers(0, 8)))
            labels = random.integers(0, 3, len(boxes))
            area = (boxes[:, 2:] - boxes[:, :2]).prod(1) * random.uniform(0.4, 1, len(boxes))
            values = (boxes, labels, random.random(len(boxes)) < 0.2, area.astype(np.float32))
            for name, value in zip(fields, values, strict=True):
                fields[name].append(torch.from_numpy(value))
            near = np.repeat(boxes, 2, 0) + random.normal(0, 5, (2 * len(boxes), 4)).astype(np.float32)
            far = random_boxes(random, 120 if image % 10 == 0 else 3)  # more than 100 in some
            own = np.concatenate([near, far])
            own[:, 2:] = np.maximum(own[:, 2:], own[:, :2] + 1)
            names = np.concatenate([np.repeat(labels, 2), random.integers(0, 3, len(far))])
            scores = random.integers(0, 100, len(own)) / 100
            found.append(Detections(*map(torch.from_numpy, (own, scores.astype(np.float32), names))))
        batches.append((found, Batch({"id": torch.tensor(list(ids)), **fields})))
    return batches


def coco_stats(case: Case) -> list[float]:
    """The twelve numbers, as pycocotools computes them."""
    annotations: list[dict[str, Any]] = []
    detections, images = [], []
    for found, batch in case:
        for index, image in enumerate(batch.ids.tolist()):
            images.append({"id": image})
            fields = (batch[name][index].tolist() for name in ("classes", "crowd", "area"))
            for box, label, crowd, area in zip(batch["boxes"][index].double().numpy(), *fields, strict=True):
                extent = [*box[:2], *(box[2:] - box[:2])]
                row = {"id": len(annotations) + 1, "image_id": image, "category_id": label, "bbox": extent}
                annotations.append({**row, "area": area, "iscrowd": int(crowd)})
            own = found[index]
            for box, score, label in zip(
                own.boxes.double().numpy(), own.scores.tolist(), own.labels.tolist(), strict=True
            ):
                extent = [*box[:2], *(box[2:] - box[:2])]
                detections.append({"image_id": image, "category_id": label, "bbox": extent, "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        categories = [{"id": number} for number in range(len(CLASSES))]
        truth.dataset = {"images": images, "annotations": annotations, "categories": categories}
        truth.createIndex()
        evaluator = COCOeval(truth, truth.loadRes(detections), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    return [float(value) for value in evaluator.stats]


def compute(metric: CocoAP | VocAP, case: Case) -> dict[str, Any]:
    return metric.compute(merge_states(metric.update(*batch) for batch in case))


@pytest.mark.parametrize("seed", range(3))
def test_the_twelve_numbers_are_those_of_pycocotools(seed: int) -> None:
    case = random_case(seed)
    values = compute(CocoAP(CLASSES), case)
    assert [values[name] for name in COCO_NAMES] == pytest.approx(coco_stats(case), abs=1e-9)
    assert values["ap"] == pytest.approx(np.mean([values[f"ap.{name}"] for name in "abc"]))
    assert "ap.unseen" not in values


def test_the_order_and_size_of_batches_do_not_matter() -> None:
    metric = CocoAP(CLASSES)
    whole, parts = (compute(metric, random_case(0, per_batch=size)) for size in (50, 7))
    assert {name: whole[name] for name in COCO_NAMES} == {name: parts[name] for name in COCO_NAMES}


def batch_of(boxes: list[list[float]], crowd: list[bool]) -> Batch:
    area = [(right - left) * (bottom - top) for left, top, right, bottom in boxes]
    fields = {"boxes": torch.tensor(boxes).reshape(-1, 4), "classes": torch.zeros(len(boxes), dtype=torch.int64)}
    fields |= {"crowd": torch.tensor(crowd, dtype=torch.bool), "area": torch.tensor(area)}
    return Batch({"id": torch.tensor([0]), **{name: [value] for name, value in fields.items()}})


def detections(*rows: tuple[list[float], float]) -> list[Detections]:
    boxes = torch.tensor([box for box, _ in rows]).reshape(-1, 4)
    return [Detections(boxes, torch.tensor([score for _, score in rows]), torch.zeros(len(rows), dtype=torch.int64))]


def test_nothing_detected_and_nothing_to_detect() -> None:
    truth = batch_of([[0, 0, 10, 10]], [False])
    for metric in (CocoAP(["a"]), VocAP(["a"])):
        values = compute(metric, [(detections(), truth)])
        assert values.get("ap50", values.get("voc_ap50")) == 0
        nothing = compute(metric, [(detections(([0, 0, 5, 5], 0.5)), batch_of([], []))])
        assert {name for name in nothing if name not in ("precision", "num_objects")} == set()


A, B, C = [0.0, 0, 10, 10], [20.0, 20, 30, 30], [40.0, 40, 50, 50]
ELSEWHERE = [70.0, 70, 80, 80]


def test_voc_ap_by_hand() -> None:
    # By score: right, wrong, right, a second one of the first object (wrong); the third object is difficult, so its
    # detection does not count. Precision 1, 1/2, 2/3, 1/2 at recall 1/2, 1/2, 1, 1.
    case = [
        (
            detections((A, 0.9), (ELSEWHERE, 0.8), (C, 0.75), (B, 0.7), (A, 0.6)),
            batch_of([A, B, C], [False, False, True]),
        )
    ]
    assert compute(VocAP(["a"]), case)["voc_ap50"] == pytest.approx(1 / 2 * 1 + 1 / 2 * 2 / 3)
    eleven = [1.0] * 6 + [2 / 3] * 5  # recall 0 to 0.5, then 0.6 to 1
    assert compute(VocAP(["a"], eleven_points=True), case)["voc_ap50"] == pytest.approx(sum(eleven) / 11)


def test_voc_ap_is_coco_ap50_as_far_as_recall_is_sampled() -> None:
    """Without crowds and with distinct scores both match alike; COCO reads the curve at 101 points."""
    case = random_case(5, images=120)
    for number, (found, batch) in enumerate(case):
        batch["crowd"] = [torch.zeros_like(each) for each in batch["crowd"]]
        case[number] = (
            [each._replace(scores=each.scores + torch.rand(len(each.scores)) / 100) for each in found],
            batch,
        )
        case[number] = ([Detections(*(field[:90] for field in each)) for each in case[number][0]], batch)
    coco, voc = compute(CocoAP(CLASSES), case), compute(VocAP(CLASSES), case)
    assert voc["voc_ap50"] == pytest.approx(coco["ap50"], abs=0.02)


def test_numbers_of_samples_beyond_float32_stay_apart() -> None:
    """2²⁴ and 2²⁴ + 1 are one number in float32: two images would be measured as one."""
    case = random_case(3)
    shifted = [(found, Batch({**batch, "id": batch.ids + 2**24})) for found, batch in case]
    expected, found = (compute(CocoAP(CLASSES), each) for each in (case, shifted))
    assert [found[name] for name in COCO_NAMES] == [expected[name] for name in COCO_NAMES]
