"""Average precision of the masks of detected objects, which are kept as packed run lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.data.io.mask import pack_masks
from paceline.metrics.detection import (
    Objects,
    coco_names,
    coco_values,
    detection_rows,
    objects_state,
    read_objects,
    truth_field,
)
from paceline.metrics.metric import MetricValues, State

_PREFIX = "mask_"


class EncodedInstances(NamedTuple):
    """What is detected in one image, in pixels of the image that masks belong to."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    runs: list[bytes]
    """The packed run lengths of each mask."""
    size: tuple[int, int]
    """Height and width of the masks."""


def instances_state(predictions: Sequence[EncodedInstances], batch: Batch) -> State:
    """The detections and the ground truth of a batch with their masks, to be joined."""
    state = objects_state(predictions, batch)
    truths = [pack_masks(masks.cpu().numpy()) for masks in truth_field(batch, "masks")]
    runs = {
        "detection": [runs for each in predictions for runs in each.runs],
        "truth": [runs for each in truths for runs in each],
    }
    for name, packed in runs.items():
        state |= _state_of_runs(name, packed)
    return state | {"sizes": _sizes(predictions)}


def _state_of_runs(name: str, packed: Sequence[bytes]) -> State:
    lengths = torch.tensor([len(each) for each in packed], dtype=torch.float64)
    joined = np.frombuffer(bytearray(b"".join(packed)), np.uint8)
    return {f"{name}_lengths": lengths, f"{name}_runs": torch.from_numpy(joined)}


def _sizes(predictions: Sequence[EncodedInstances]) -> Tensor:
    return torch.tensor([each.size for each in predictions], dtype=torch.float64)


def read_runs(state: Mapping[str, Tensor], name: str, rows: Tensor) -> Iterator[dict[str, Any]]:
    """The mask of each row, as COCO's run lengths, where a row begins with its sample."""
    sizes = dict(zip(state["samples"].tolist(), state["sizes"].long().tolist(), strict=True))
    packed, start = state[f"{name}_runs"].numpy().tobytes(), 0
    for sample, length in zip(rows[:, 0].tolist(), state[f"{name}_lengths"].long().tolist(), strict=True):
        yield {"size": sizes[sample], "counts": packed[start : start + length]}
        start += length


def masked_objects(state: State) -> tuple[Objects, Objects]:
    """The ground truth and the detections of a state with their masks."""
    truth, found = state["truth"], state["detections"]
    masks = [list(read_runs(state, name, rows)) for name, rows in (("truth", truth), ("detection", found))]
    return read_objects(truth, True, masks[0]), read_objects(found, False, masks[1])


@register.metric("coco_mask_ap")
class CocoMaskAP:
    """COCO's average precision and recall of masks, as pycocotools computes them; computed by faster-coco-eval.

    - "mask_ap": the mean over IoU thresholds from 0.5 to 0.95 and over classes; "mask_ap50" and "mask_ap75" at one
      threshold; "mask_ap_small", "mask_ap_medium" and "mask_ap_large" by the objects' areas, as for boxes.
    - "mask_ar1", "mask_ar10" and "mask_ar100": average recall with so many detections in an image, and by size.
    - "mask_ap.NAME": the AP of each class.
    A value without any object to measure it on is left out.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = list(classes)
        self.higher_is_better = dict.fromkeys(coco_names(self.classes, _PREFIX), True)

    def update(self, predictions: Sequence[EncodedInstances], batch: Batch) -> State:
        return instances_state(predictions, batch)

    def compute(self, state: State) -> MetricValues:
        return coco_values(state["samples"], self.classes, *masked_objects(state), prefix=_PREFIX)


class InstanceRows:
    """Collects all detections of a split with their masks."""

    higher_is_better: ClassVar[Mapping[str, bool]] = {}

    def update(self, predictions: Sequence[EncodedInstances], batch: Batch) -> State:
        """Of each detection, sample, image id, label, score and x1, y1, x2, y2, float64 [K, 8], and its mask."""
        runs = _state_of_runs("detection", [runs for each in predictions for runs in each.runs])
        rows = {"detections": detection_rows(predictions, batch), "samples": batch.ids.cpu().double()}
        return rows | runs | {"sizes": _sizes(predictions)}

    def compute(self, state: State) -> MetricValues:
        return dict(state)
