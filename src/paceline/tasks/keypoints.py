"""Keypoints of one person in each image (pose): a heatmap of each keypoint, and its maximum between pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.errors import DataError, RecipeError
from paceline.core.registry import register
from paceline.core.world import to_float64
from paceline.data.batch import TRUTHS, Batch, KeypointNames
from paceline.losses.heatmap import stack_keypoints
from paceline.losses.loss_term import Loss
from paceline.metrics.keypoints import PCK, TORSO, KeypointAP, known_sigmas, pose_rows, truth_keypoints
from paceline.metrics.metric import LossMetrics, Metric, MetricOf, Rows
from paceline.models.model_errors import call_model
from paceline.models.simple_baseline import Decode, Poses, decode_heatmaps, flip_heatmaps
from paceline.tasks.task import Task, compare_by
from paceline.visualize.grid import KEYPOINT_LEGEND, Panel
from paceline.visualize.image import Image, fit, to_image
from paceline.visualize.overlay import draw_keypoints

_IMAGE_SIDE = 200
_CERTAIN = 0.2  # keypoints with a lower score are drawn hollow
_HIDDEN, _VISIBLE = 1, 2


@register.task("keypoints")
class Keypoints(Task):
    """Predicts the keypoints of one person in each image, as heatmaps.

    `decode` refines the maximum of a heatmap: `dark` (the default), `quarter` or `argmax`. `flip` averages the heatmaps
    of an image and of its mirror image.
    """

    original_size = True
    error_name = "mean distance in diagonals of the image"
    output_name = "heatmaps"

    def __init__(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float],
        joints: KeypointNames | None,
        classes: Sequence[str] = (),
        extra_metrics: Sequence[Metric] = (),
        decode: Decode = "dark",
        flip: bool = False,
    ) -> None:
        if joints is None:
            raise DataError(
                "keypoints: the data set has none; use dataset: keypoints, or coco with keypoints: true, or give your"
                " own data set `keypoint_names`"
            )
        super().__init__(losses, weights, classes)
        compare_by(heatmaps_and_places, losses.values())
        compare_by(_keypoints_and_truth, extra_metrics)
        self.joints = joints
        self._decode: Decode = decode
        self._flip = flip
        own = LossMetrics(self.loss_functions, self.weights)
        self._metrics: list[Metric] = [MetricOf(own, lambda found, batch: (found.heatmaps, batch))]
        if known_sigmas(joints.names):
            self._metrics.append(KeypointAP(joints))
            self.main_metric = "ap"
        if {name for pair in TORSO for name in pair} <= set(joints.names):
            self._metrics.append(PCK(joints))
            self.main_metric = "pck"
        # A metric that the recipe names with other arguments takes the place of the default.
        named = {type(each) for each in extra_metrics}
        self._metrics = [each for each in self._metrics if type(each) not in named] + list(extra_metrics)

    def predict(self, model: nn.Module, batch: Batch) -> Poses:
        """The keypoints of each image's person, also in pixels of the image as it was read."""
        images = batch["image"]
        heatmaps = self._heatmaps(model, images)
        if self._flip:
            flipped = flip_heatmaps(self._heatmaps(model, images.flip(-1)), self.joints.pairs)
            heatmaps = (heatmaps + flipped) / 2
        height, width = images.shape[-2:]
        points, scores = decode_heatmaps(heatmaps, (height, width), self._decode)
        return Poses(heatmaps, points, _to_original(points, batch), scores)

    def _heatmaps(self, model: nn.Module, images: Tensor) -> Tensor:
        outputs = call_model(model, images)
        expected = len(self.joints.names)
        if not isinstance(outputs, Tensor) or outputs.ndim != 4 or outputs.shape[1] != expected:
            found = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise RecipeError(f"model: got {found}, expected heatmaps [N, {expected}, h, w]; use simple_baseline")
        return outputs.float()

    def export_details(self) -> dict[str, Any]:
        """The joints of the heatmaps, and how their maxima are refined."""
        return {"joints": list(self.joints.names), "decode": self._decode}

    def draw(self, batch: Batch, predictions: Poses | None, index: int) -> list[Panel]:
        """Draw the skeleton of the ground truth and, if there is one, the predicted one."""
        image = to_image(batch["image"][index])
        truth = self._panel(image, batch["keypoints"][index].cpu().numpy(), "truth")
        if predictions is None:
            return [truth]
        score = float(predictions.scores[index].mean())
        found = self._visible(predictions.points[index], predictions.scores[index])
        return [truth, self._panel(image, found, f"prediction, score {score:.2f}")]

    def sample_errors(self, predictions: Poses, batch: Batch) -> Tensor:
        """The mean distance of each sample's labeled keypoints from the truth, in diagonals of the image, [N]."""
        truth = stack_keypoints(batch).to(predictions.points.device)
        distances = torch.linalg.vector_norm(predictions.points - truth[..., :2], dim=2)
        is_labeled = truth[..., 2] > 0
        totals: Tensor = (distances * is_labeled).sum(1) / math.hypot(*batch["image"].shape[-2:])
        return totals / is_labeled.sum(1).clamp(min=1)

    def draw_prediction(self, image: Image, batch: Batch, predictions: Poses, index: int) -> Panel:
        """Draw the predicted skeleton over the image as it was read; what is uncertain is hollow."""
        found = self._visible(predictions.keypoints[index], predictions.scores[index])
        return self._panel(image, found, "", max(image.shape[:2]))

    def keypoint_metric(self) -> Metric:
        return Rows("poses", pose_rows)

    def _visible(self, points: Tensor, scores: Tensor) -> np.ndarray[Any, Any]:
        """One person [1, J, 3] to draw: keypoints that are not certain as hidden ones."""
        seen = torch.where(scores >= _CERTAIN, _VISIBLE, _HIDDEN)
        return torch.cat([points, seen[:, None]], 1)[None].cpu().numpy()

    def _panel(self, image: Image, keypoints: np.ndarray[Any, Any], caption: str, side: int = _IMAGE_SIDE) -> Panel:
        small = fit(image, side)
        scaled = keypoints * np.array([small.shape[1] / image.shape[1], small.shape[0] / image.shape[0], 1])
        drawn = draw_keypoints(small, scaled, self.joints.names, self.joints.limbs)
        return Panel(drawn, caption, legend=KEYPOINT_LEGEND)


def heatmaps_and_places(heatmaps: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Heatmaps [N, J, h, w], and keypoints [N, J, 3] as x and y in pixels of the heatmap, and 0 if not labeled."""
    keypoints, images = stack_keypoints(batch), batch["image"]
    if heatmaps.ndim != 4 or heatmaps.shape[1] != keypoints.shape[1]:
        expected = f"expected heatmaps [N, {keypoints.shape[1]}, h, w]; build it with num_keypoints"
        raise RecipeError(f"model: got outputs of shape {list(heatmaps.shape)}, {expected}")
    scale = [heatmaps.shape[-1] / images.shape[-1], heatmaps.shape[-2] / images.shape[-2], 1.0]
    return heatmaps, keypoints * keypoints.new_tensor(scale)


def _keypoints_and_truth(poses: Poses, batch: Batch) -> tuple[Tensor, Tensor]:
    """Predictions [N, J, 2] and labels [N, J, 3] in pixels of the image as it was read."""
    return poses.keypoints, torch.stack(truth_keypoints(batch))


def _to_original(points: Tensor, batch: Batch) -> Tensor:
    """Points [N, J, 2] of the images, float64, in pixels of those that were read if the truth is kept there."""
    exact = to_float64(points)
    if TRUTHS["keypoints"] not in batch:
        return exact
    matrices = to_float64(batch["matrix"]).to(exact.device)  # [N, 2, 3]
    return exact @ matrices[:, :, :2].transpose(1, 2) + matrices[:, None, :, 2]
