"""Keypoint detection: the box of each person (or other object) and its keypoints, in images of any number of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Share, Weight
from paceline.core.errors import DataError, RecipeError
from paceline.core.registry import register
from paceline.core.world import to_float64
from paceline.data.batch import Batch, KeypointNames
from paceline.data.transforms.annotations import invert_affine
from paceline.metrics.keypoints import DetectedKeypointAP, detected_pose_rows
from paceline.metrics.metric import Metric, Rows
from paceline.models.detector import Detector, KeypointDetections, Target
from paceline.tasks.detection import Detection, to_original
from paceline.visualize.grid import Panel
from paceline.visualize.image import Image
from paceline.visualize.overlay import draw_keypoints

_HIDDEN, _VISIBLE = 1, 2
_MIN_DRAWN, _MAX_DRAWN = 10, 20


@register.task("keypoint_detection")
class KeypointDetection(Detection):
    """Detects the people in an image and their keypoints. The model brings its losses; `loss_weights` weighs them."""

    main_metric = "keypoint_ap"
    _detects = KeypointDetections

    def __init__(
        self,
        model: nn.Module,
        classes: Sequence[str],
        joints: KeypointNames | None,
        extra_metrics: Sequence[Metric] = (),
        loss_weights: Mapping[str, Weight] | None = None,
        min_score: Annotated[Share | None, Field(description="Detections with a lower score are left out.")] = None,
    ) -> None:
        if joints is None:
            raise DataError("keypoint_detection: the data set has no keypoints; set `keypoints: true` of coco")
        super().__init__(model, classes, extra_metrics, loss_weights, min_score=min_score)
        self.joints = joints
        self._metrics = [DetectedKeypointAP(joints), *self._metrics]

    def _loss_names(self, model: nn.Module) -> Sequence[str]:
        if not isinstance(model, Detector) or not getattr(model, "predicts_keypoints", False):
            raise RecipeError(
                f"model: {type(model).__name__} detects no keypoints; use torchvision/detection/keypointrcnn_…, or"
                " task: keypoints for heatmaps of one person in each image"
            )
        return model.loss_names

    def _targets(self, batch: Batch) -> list[Target]:
        targets = super()._targets(batch)
        for target, keypoints, crowd in zip(targets, batch["keypoints"], batch["crowd"], strict=True):
            target["keypoints"] = keypoints[(~crowd).to(keypoints.device)] if crowd.any() else keypoints
        return targets

    def predict(self, model: nn.Module, batch: Batch) -> list[KeypointDetections]:
        """What is detected in each image, in pixels of the image as it was read."""
        return [
            each._replace(
                boxes=to_original(each.boxes, batch, index),
                keypoints=_map(each.keypoints, batch["matrix"][index]) if "matrix" in batch else each.keypoints,
            )
            for index, each in enumerate(self._detect(model, batch))
        ]

    def draw(self, batch: Batch, predictions: list[Any] | None, index: int) -> list[Panel]:
        """Draw the boxes and skeletons of the ground truth and, if there are any, of the best detections."""
        people = [batch["keypoints"][index].cpu().numpy()]
        if predictions is not None:
            best, _ = self._best(predictions[index], max(_MIN_DRAWN, len(people[0])))
            if "matrix" in batch:
                back = torch.from_numpy(invert_affine(batch["matrix"][index].cpu().double().numpy()))
                best = best._replace(keypoints=_map(best.keypoints, back))
            people.append(_visible(best))
        panels = super().draw(batch, predictions, index)
        width = batch.image(index).shape[-1]
        return [self._with_keypoints(*each, width) for each in zip(panels, people, strict=True)]

    def draw_prediction(self, image: Image, batch: Batch, predictions: list[Any], index: int) -> Panel:
        """Draw the 20 best detections over the image as it was read, or all of them from `min_score` on."""
        best, _ = self._best(predictions[index], _MAX_DRAWN)
        panel = super().draw_prediction(image, batch, predictions, index)
        return self._with_keypoints(panel, _visible(best), image.shape[1])

    def keypoint_metric(self) -> Metric:
        return Rows("poses", detected_pose_rows)

    def _with_keypoints(self, panel: Panel, people: NDArray[Any], width: int) -> Panel:
        scale = panel.image.shape[1] / width
        drawn = draw_keypoints(panel.image, people * [scale, scale, 1], self.joints.names, self.joints.limbs)
        return panel._replace(image=drawn)


def _visible(found: KeypointDetections) -> NDArray[Any]:
    """The keypoints of detections [K, J, 3] to draw: those that are not certain as hidden ones."""
    seen = torch.where(found.keypoint_scores > 0, _VISIBLE, _HIDDEN)
    return np.asarray(torch.cat([found.keypoints, seen[..., None]], 2).cpu())


def _map(points: Tensor, matrix: Tensor) -> Tensor:
    exact = to_float64(matrix).to(points.device)
    return to_float64(points) @ exact[:, :2].T + exact[:, 2]
