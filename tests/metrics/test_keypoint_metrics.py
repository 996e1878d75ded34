"""OKS average precision against pycocotools, and PCK against loops over all keypoints."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from paceline.core.errors import ArgumentError, DataError
from paceline.data.batch import Batch, KeypointNames
from paceline.data.datasets.keypoints import known_keypoints
from paceline.metrics.keypoints import OKS_NAMES, PCK, DetectedKeypointAP, KeypointAP, PCKh
from paceline.metrics.metric import Metric, merge_states
from paceline.models.detector import KeypointDetections
from paceline.models.simple_baseline import Poses

Case = list[tuple[Poses, Batch]]
SIZE = 400


def joints(count: int) -> KeypointNames:
    found = known_keypoints(count)
    assert found is not None
    return found


def random_case(seed: int, count: int = 17, samples: int = 120, per_batch: int = 7) -> Case:
    """A person a sample, three in an image: of all sizes, crowds, without any labeled keypoint, or with no person."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(samples):
        place, side = random.uniform(0, SIZE, 2), math.exp(random.uniform(2.5, 5.5))
        points = place + random.uniform(0, side, (count, 2))
        seen = random.choice([0, 1, 2], (count, 1), p=[0.3, 0.2, 0.5]) * (random.random() > 0.1)
        truth = np.concatenate([points * (seen > 0), seen], 1)[None].astype(np.float32)
        box = np.array([[*place, *(place + side)]], np.float32)
        crowd, area = random.random(1) < 0.1, np.array([side * side * random.uniform(0.4, 1)], np.float32)
        kept = slice(0, int(random.random() > 0.05))
        found = points + random.normal(0, side * random.choice([0.01, 0.05, 0.3]), (count, 2))
        scores = random.integers(0, 20, count) / 20
        rows.append((truth[kept], box[kept], crowd[kept], area[kept], found, scores))
    return list(batched(rows, per_batch))


def batched(rows: list[tuple[Any, ...]], per_batch: int) -> Iterator[tuple[Poses, Batch]]:
    for start in range(0, len(rows), per_batch):
        own = rows[start : start + per_batch]
        *fields, found, scores = zip(*own, strict=True)
        named = zip(("keypoints", "boxes", "crowd", "area"), fields, strict=True)
        ids = torch.arange(start, start + len(own))
        values = {name: [torch.from_numpy(each) for each in column] for name, column in named}
        points = torch.from_numpy(np.stack(found))
        poses = Poses(torch.zeros(len(own), 1, 1, 1), points, points, torch.from_numpy(np.stack(scores)))
        yield poses, Batch({"id": ids, "image_id": ids // 3, **values})


def compute(metric: Metric, case: Case) -> dict[str, Any]:
    return metric.compute(merge_states(metric.update(*batch) for batch in case))


def coco_stats(case: Case, sigmas: list[float] | None = None) -> list[float]:
    """The ten numbers, as pycocotools computes them."""
    annotations: list[dict[str, Any]] = []
    found = []
    for poses, batch in case:
        for index, image in enumerate(batch["image_id"].tolist()):
            for person, keypoints in enumerate(batch["keypoints"][index].double().numpy()):
                left, top, right, bottom = batch["boxes"][index][person].double().tolist()
                annotations.append({
                    "id": len(annotations) + 1, "image_id": image, "category_id": 1,
                    "iscrowd": int(batch["crowd"][index][person]), "area": float(batch["area"][index][person]),
                    "bbox": [left, top, right - left, bottom - top], "keypoints": keypoints.flatten().tolist(),
                    "num_keypoints": int((keypoints[:, 2] > 0).sum()),
                })  # fmt: skip
                places = np.column_stack([poses.keypoints[index].numpy(), poses.scores[index].numpy()])
                row = {"image_id": image, "category_id": 1, "keypoints": places.flatten().tolist()}
                found.append({**row, "score": float(poses.scores[index].double().mean())})
    return stats_of(1 + max(int(batch["image_id"].max()) for _, batch in case), annotations, found, sigmas)


def stats_of(
    num_images: int, annotations: list[dict[str, Any]], found: list[dict[str, Any]], sigmas: list[float] | None = None
) -> list[float]:
    images = [{"id": each} for each in range(num_images)]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {"images": images, "annotations": annotations, "categories": [{"id": 1}]}
        truth.createIndex()
        evaluator = COCOeval(truth, truth.loadRes(found), "keypoints")
        if sigmas:
            evaluator.params.kpt_oks_sigmas = np.array(sigmas)
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    return [float(value) for value in evaluator.stats]


@pytest.mark.parametrize("seed", range(4))
def test_the_ten_numbers_are_those_of_pycocotools(seed: int) -> None:
    case = random_case(seed)
    values = compute(KeypointAP(joints(17)), case)
    assert [values[name] for name in OKS_NAMES] == pytest.approx(coco_stats(case), abs=1e-9)
    assert 0.1 < values["ap"] < 0.9


def test_they_are_of_detected_people_too() -> None:
    """Several or none in an image, some found twice, others not, and more than there are, by the scores of boxes."""
    random, metric = np.random.default_rng(5), DetectedKeypointAP(joints(17))
    annotations: list[dict[str, Any]] = []
    found, states = [], []
    for image in range(40):
        number, extra = random.integers(0, 4, 2)
        keypoints = random.uniform(0, SIZE, (number, 1, 2)) + random.uniform(0, 120, (number, 17, 2))
        seen = random.choice([0, 1, 2], (number, 17, 1))
        truth = np.concatenate([keypoints * (seen > 0), seen], 2).astype(np.float32)
        area = random.uniform(500, 20000, number).astype(np.float32)
        crowd = random.random(number) < 0.1
        guesses = np.concatenate([keypoints, keypoints[:extra]])
        guesses = guesses + random.normal(0, random.choice([1, 8, 40], (len(guesses), 1, 1)), guesses.shape)
        guesses = np.concatenate([guesses, random.uniform(0, SIZE, (extra, 17, 2))])
        scores = random.permutation(100)[: len(guesses)] / 100
        for own, size, is_crowd in zip(truth.astype(float), area.tolist(), crowd.tolist(), strict=True):
            annotations.append({
                "id": len(annotations) + 1, "image_id": image, "category_id": 1, "iscrowd": int(is_crowd), "area": size,
                "bbox": [0, 0, 50, 50], "num_keypoints": int((own[:, 2] > 0).sum()),
                "keypoints": own.flatten().tolist(),
            })  # fmt: skip
        for own, score in zip(guesses, scores.tolist(), strict=True):
            places = np.column_stack([own, np.ones(17)]).flatten().tolist()
            found.append({"image_id": image, "category_id": 1, "keypoints": places, "score": score})
        fields = {"keypoints": truth, "boxes": np.tile(np.array([0, 0, 50, 50], np.float32), (number, 1))}
        fields |= {"area": area, "crowd": crowd}
        batch = Batch({"id": torch.tensor([image])} | {name: [torch.from_numpy(each)] for name, each in fields.items()})
        boxes, labels = torch.zeros(len(scores), 4), torch.zeros(len(scores), dtype=torch.int64)
        guessed = (torch.from_numpy(guesses), torch.ones(len(scores), 17))
        states.append(metric.update([KeypointDetections(boxes, torch.from_numpy(scores), labels, *guessed)], batch))
    values = metric.compute(merge_states(states))
    expected = stats_of(40, annotations, found)
    assert [values[f"keypoint_{name}"] for name in OKS_NAMES] == pytest.approx(expected, abs=1e-9)
    assert 0.1 < values["keypoint_ap"] < 0.9


def test_they_are_with_other_keypoints_and_sigmas_too() -> None:
    case, sigmas = random_case(9, count=14), np.linspace(0.02, 0.2, 14).tolist()
    values = compute(KeypointAP(joints(14), sigmas), case)
    assert [values[name] for name in OKS_NAMES] == pytest.approx(coco_stats(case, sigmas), abs=1e-9)
    ankle, *_, head = KeypointAP(joints(14)).sigmas
    assert (ankle, head) == (0.089, 0.079)


@pytest.mark.parametrize("metric", [KeypointAP(joints(14)), PCK(joints(14)), PCKh(joints(14))])
def test_the_size_of_batches_does_not_matter(metric: Metric) -> None:
    whole, parts = (compute(metric, random_case(3, 14, per_batch=size)) for size in (200, 7))
    assert whole == parts
    assert whole


@pytest.mark.parametrize("threshold", [0.2, 0.5])
def test_pck_is_that_of_a_loop(threshold: float) -> None:
    names = joints(14).names
    case = random_case(1, count=14)
    right, number = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for poses, batch in case:
        for index, people in enumerate(batch["keypoints"]):
            for person in people.double().tolist():
                by_name = dict(zip(names, person, strict=True))
                length = 0.0
                for start, end in (("left_shoulder", "right_hip"), ("right_shoulder", "left_hip")):
                    if not length and by_name[start][2] and by_name[end][2]:
                        length = math.dist(by_name[start][:2], by_name[end][:2])
                for name, found in zip(names, poses.keypoints[index].tolist(), strict=True):
                    if length and by_name[name][2]:
                        number[name] += 1
                        right[name] += math.dist(found, by_name[name][:2]) <= threshold * length
    values = compute(PCK(joints(14), threshold=threshold), case)
    assert values["pck"] == sum(right.values()) / sum(number.values())
    assert {name: values[f"pck.{name}"] for name in names} == {name: right[name] / number[name] for name in names}
    assert 0.1 < values["pck"] < 0.9


def test_pckh_is_measured_by_the_head() -> None:
    names = joints(14).names
    truth = torch.zeros(1, 14, 3)
    truth[0, names.index("neck")] = torch.tensor([10.0, 30, 2])
    truth[0, names.index("head_top")] = torch.tensor([10.0, 10, 1])
    truth[0, names.index("left_hip")] = torch.tensor([50.0, 50, 2])
    found = truth[..., :2].double() + torch.tensor([9.9, 0.0])
    found[0, names.index("left_hip")] += torch.tensor([0.2, 0.0])
    batch = Batch({"id": torch.arange(1), "keypoints": [truth]})
    values = compute(PCKh(joints(14)), [(Poses(found, found, found, found[..., 0]), batch)])
    assert values == {"pckh": 2 / 3, "pckh.left_hip": 0, "pckh.neck": 1, "pckh.head_top": 1}


def test_nothing_to_measure_is_no_value() -> None:
    nobody = Batch({
        "id": torch.arange(1), "keypoints": [torch.zeros(0, 14, 3)], "boxes": [torch.zeros(0, 4)],
        "crowd": [torch.zeros(0, dtype=torch.bool)], "area": [torch.zeros(0)],
    })  # fmt: skip
    points = torch.zeros(1, 14, 2)
    poses = Poses(points, points, points, points[..., 0])
    for metric in (KeypointAP(joints(14)), PCK(joints(14)), PCKh(joints(14))):
        assert compute(metric, [(poses, nobody)]) == {}


def test_unknown_keypoints_are_refused() -> None:
    tail = KeypointNames(["nose", "tail"], [], [])
    with pytest.raises(ArgumentError, match="left_shoulder"):
        PCK(tail)
    with pytest.raises(ArgumentError, match="2 numbers"):
        KeypointAP(tail)
    with pytest.raises(ArgumentError, match="2 numbers"):
        KeypointAP(tail, [0.1])
    with pytest.raises(DataError):
        PCK(None)


def test_several_people_in_a_sample_are_refused() -> None:
    points = torch.zeros(1, 14, 2)
    batch = Batch({"id": torch.tensor([7]), "keypoints": [torch.ones(2, 14, 3)]})
    with pytest.raises(DataError, match=r"sample 7 .*per_object"):
        PCK(joints(14)).update(Poses(points, points, points, points[..., 0]), batch)
