"""Metrics of keypoints: PCK and PCKh, and COCO's average precision by object keypoint similarity (OKS)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from paceline.core.arguments import Positive
from paceline.core.errors import ArgumentError, DataError
from paceline.core.registry import register
from paceline.data.argument_types import Name
from paceline.data.batch import Batch, KeypointNames
from paceline.losses.heatmap import only_person
from paceline.metrics.detection import evaluate_coco, truth_field
from paceline.metrics.metric import MetricValues, State
from paceline.models.detector import KeypointDetections
from paceline.models.simple_baseline import Poses

NamePair = Annotated[Sequence[Name], Field(min_length=2, max_length=2)]
TORSO = (("left_shoulder", "right_hip"), ("right_shoulder", "left_hip"))
HEAD = (("head_top", "neck"),)
OKS_NAMES = ("ap", "ap50", "ap75", "ap_medium", "ap_large", "ar", "ar50", "ar75", "ar_medium", "ar_large")
OKS_SIGMAS = {
    "nose": 0.026, "eye": 0.025, "ear": 0.035, "shoulder": 0.079, "elbow": 0.072, "wrist": 0.062,
    "hip": 0.107, "knee": 0.087, "ankle": 0.089, "neck": 0.079, "head_top": 0.079,
}  # fmt: skip
"""COCO's, by name without its side; of neck and head_top, which COCO has not, CrowdPose's."""


def known_sigmas(names: Sequence[str]) -> list[float] | None:
    """COCO's sigma of each keypoint, or None if one of them is not known."""
    found = [OKS_SIGMAS.get(name.lower().removeprefix("left_").removeprefix("right_")) for name in names]
    known = [sigma for sigma in found if sigma is not None]
    return known if len(known) == len(names) else None


class _CorrectKeypoints:
    """The share of labeled keypoints that are predicted within `threshold` times a length of the person."""

    def __init__(
        self, name: str, joints: KeypointNames | None, threshold: float, reference: Sequence[Sequence[str]]
    ) -> None:
        names = _names(joints)
        self._name, self._names, self._threshold = name, names, threshold
        unknown = next((each for pair in reference for each in pair if each not in names), None)
        if unknown is not None:
            raise ArgumentError("reference", f"no keypoint is called {unknown!r}; there are {', '.join(names)}")
        self._pairs = [(names.index(start), names.index(end)) for start, end in reference]
        self.higher_is_better = dict.fromkeys((name, *(f"{name}.{each}" for each in names)), True)

    def update(self, predictions: Poses, batch: Batch) -> State:
        """How many labeled keypoints there are, and how many of them are predicted correctly, int64 [J]."""
        correct = torch.zeros(len(self._names), dtype=torch.int64)
        count = torch.zeros_like(correct)
        for truth, found in zip(truth_keypoints(batch), predictions.keypoints.cpu().double(), strict=True):
            length = self._length(truth)
            if length is not None:
                is_labeled = truth[:, 2] > 0
                is_near = (found - truth[:, :2]).square().sum(1).sqrt() <= self._threshold * length
                count += is_labeled
                correct += is_labeled & is_near
        return {"correct": correct, "count": count}

    def _length(self, truth: Tensor) -> Tensor | None:
        for start, end in self._pairs:
            if truth[start, 2] > 0 and truth[end, 2] > 0:
                return (truth[start, :2] - truth[end, :2]).square().sum().sqrt()
        return None

    def compute(self, state: State) -> MetricValues:
        correct, count = state["correct"].tolist(), state["count"].tolist()
        each = zip(self._names, correct, count, strict=True)
        values = {f"{self._name}.{name}": right / number for name, right, number in each if number}
        return {self._name: sum(correct) / sum(count), **values} if values else {}


@register.metric("pck")
class PCK(_CorrectKeypoints):
    """Percentage of correct keypoints: those predicted within `threshold` times the torso's length.

    The torso's length is the distance between the first pair of `reference` whose keypoints are both labeled: the left
    shoulder and the right hip, else the right shoulder and the left hip. A person who lacks both is not counted.
    Values: "pck" over all labeled keypoints, "pck.NAME" of each.
    """

    def __init__(
        self,
        joints: KeypointNames | None,
        threshold: Positive = 0.2,
        reference: Annotated[Sequence[NamePair], Field(min_length=1)] = TORSO,
    ) -> None:
        super().__init__("pck", joints, threshold, reference)


@register.metric("pckh")
class PCKh(_CorrectKeypoints):
    """Percentage of correct keypoints: those predicted within `threshold` times the head's length.

    The head's length is the distance between the keypoints of `reference`. A person whose head is not labeled is not
    counted. Values: "pckh" over all labeled keypoints, "pckh.NAME" of each.
    """

    def __init__(
        self,
        joints: KeypointNames | None,
        threshold: Positive = 0.5,
        reference: Annotated[Sequence[NamePair], Field(min_length=1)] = HEAD,
    ) -> None:
        super().__init__("pckh", joints, threshold, reference)


@register.metric("coco_keypoint_ap")
class KeypointAP:
    """COCO's average precision and recall of keypoints (OKS), as pycocotools computes them; by faster-coco-eval.

    - "ap": the mean over OKS thresholds from 0.5 to 0.95; "ap50" and "ap75" at one threshold; "ap_medium" and
      "ap_large" of people between 32² and 96² pixels, and above.
    - "ar", "ar50", "ar75", "ar_medium" and "ar_large": average recall.
    A value without any person to measure it on is left out. `sigmas` are COCO's by default, by the keypoints' names.
    The score of a person is the mean of the keypoints' scores. Images without a person count for nothing.
    """

    def __init__(self, joints: KeypointNames | None, sigmas: Sequence[Positive] | None = None) -> None:
        names = _names(joints)
        known = list(sigmas) if sigmas else known_sigmas(names)
        if known is None or len(known) != len(names):
            found = "are not known by their names" if known is None else f"are {len(known)}"
            raise ArgumentError("sigmas", f"expected {len(names)} numbers, one for each keypoint; they {found}")
        self.sigmas = known
        self.higher_is_better = dict.fromkeys(OKS_NAMES, True)

    def update(self, predictions: Any, batch: Batch) -> State:
        rows = _truth_rows(batch)
        has_person = torch.tensor([len(each) > 0 for each in rows])
        return {"poses": pose_rows(predictions, batch)[has_person], "truth": torch.cat(rows)}

    def compute(self, state: State) -> MetricValues:
        if not len(state["truth"]):
            return {}
        stats = evaluate_oks(state["truth"].tolist(), state["poses"].tolist(), self.sigmas)
        return {name: value for name, value in zip(OKS_NAMES, stats, strict=True) if value >= 0}


class DetectedKeypointAP(KeypointAP):
    """The same of people who are detected: "keypoint_ap" and so on. The score of a person is that of its box."""

    def __init__(self, joints: KeypointNames | None) -> None:
        super().__init__(joints)
        self.higher_is_better = {f"keypoint_{name}": True for name in OKS_NAMES}

    def update(self, predictions: Sequence[KeypointDetections], batch: Batch) -> State:
        return {"poses": detected_pose_rows(predictions, batch), "truth": torch.cat(_truth_rows(batch))}

    def compute(self, state: State) -> MetricValues:
        return {f"keypoint_{name}": value for name, value in super().compute(state).items()}


def _truth_rows(batch: Batch) -> list[Tensor]:
    """The people of each image, float64 [K, 7 + 3 J]: image id, crowd, area, box, and x, y and visibility of each."""
    fields = zip(*(truth_field(batch, name) for name in ("crowd", "area", "boxes", "keypoints")), strict=True)
    rows = []
    for image, (crowd, area, boxes, keypoints) in zip(image_ids(batch).tolist(), fields, strict=True):
        images = torch.full((len(area), 1), image, dtype=torch.int64)
        columns = [images, crowd[:, None], area[:, None], boxes, keypoints.flatten(1)]
        rows.append(torch.cat([each.cpu().double() for each in columns], 1))
    return rows


def detected_pose_rows(predictions: Sequence[KeypointDetections], batch: Batch) -> Tensor:
    """All detections of a batch: sample, image id, score, and x, y and score of each keypoint, float64 [K, 3 + 3 J]."""
    rows = []
    for sample, image, each in zip(batch.ids.tolist(), image_ids(batch).tolist(), predictions, strict=True):
        ids = torch.tensor([[sample, image]]).expand(len(each.scores), 2)
        places = torch.cat([each.keypoints, each.keypoint_scores[..., None]], 2).flatten(1)
        rows.append(torch.cat([part.detach().cpu().double() for part in (ids, each.scores[:, None], places)], 1))
    return torch.cat(rows)


def pose_rows(predictions: Poses, batch: Batch) -> Tensor:
    """Sample, image id, score, and x, y and score of each keypoint: float64 [N, 3 + 3 J]."""
    scores = predictions.scores.detach().cpu().double()
    places = torch.cat([predictions.keypoints.detach().cpu().double(), scores[..., None]], 2)
    columns = [batch.ids.cpu()[:, None], image_ids(batch)[:, None], scores.mean(1, keepdim=True), places.flatten(1)]
    return torch.cat([each.double() for each in columns], 1)


def image_ids(batch: Batch) -> Tensor:
    """The number that the data set's files give each sample's image, or the sample's; several may share an image."""
    found: Tensor = batch.get("image_id", batch.ids)
    return found.cpu()


def truth_keypoints(batch: Batch) -> list[Tensor]:
    """The keypoints of each sample's person, float64 [J, 3], where predictions are measured."""
    fields = truth_field(batch, "keypoints")
    return [only_person(each, batch, index).cpu().double() for index, each in enumerate(fields)]


def evaluate_oks(
    truth: Sequence[Sequence[float]], poses: Sequence[Sequence[float]], sigmas: Sequence[float]
) -> list[float]:
    """COCO's ten numbers; -1 for one that nothing can be measured on."""
    annotations = [_annotation(number, row) for number, row in enumerate(truth, start=1)]
    found = [
        {"image_id": int(image), "category_id": 0, "keypoints": list(points), "score": score}
        for _, image, score, *points in poses
    ]
    images = map(int, sorted({row[0] for row in truth} | {row[1] for row in poses}))
    evaluator = evaluate_coco(images, 1, annotations, found, "keypoints", kpt_oks_sigmas=list(sigmas))
    return [float(value) for value in evaluator.stats[:10]]


def _annotation(number: int, row: Sequence[float]) -> dict[str, Any]:
    image, crowd, area, left, top, right, bottom, *keypoints = row
    return {
        "id": number, "image_id": int(image), "category_id": 0, "iscrowd": int(crowd), "area": area,
        "bbox": [left, top, right - left, bottom - top], "keypoints": keypoints,
        "num_keypoints": sum(seen > 0 for seen in keypoints[2::3]),
    }  # fmt: skip


def _names(joints: KeypointNames | None) -> list[str]:
    if joints is None:
        raise DataError("this metric needs keypoints, and the data set has none")
    return list(joints.names)
