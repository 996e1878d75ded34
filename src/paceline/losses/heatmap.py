"""Heatmap losses: a model's maps against a Gaussian at each labeled keypoint of batch["keypoints"]."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.arguments import Positive
from paceline.core.errors import DataError, RecipeError
from paceline.core.registry import register
from paceline.core.world import constant
from paceline.data.batch import Batch
from paceline.losses.loss_term import LossTerm


@register.loss("heatmap_mse")
class HeatmapMSE:
    """Mean squared error of a heatmap, averaged over the labeled keypoints of the global batch.

    The target is a Gaussian with its peak, 1, at the keypoint; `sigma` is in pixels of the heatmap.
    """

    def __init__(self, sigma: Positive = 2.0) -> None:
        self.sigma = sigma

    def count(self, batch: Batch) -> Tensor:
        return (stack_keypoints(batch)[..., 2] > 0).sum()

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        keypoints = stack_keypoints(batch)
        if outputs.ndim != 4 or outputs.shape[1] != keypoints.shape[1]:
            expected = f"expected heatmaps [N, {keypoints.shape[1]}, h, w], one for each keypoint"
            raise RecipeError(f"model: got outputs of shape {list(outputs.shape)}, {expected}")
        height, width = batch["image"].shape[-2:]
        targets = gaussian_heatmaps(keypoints[..., :2], (height, width), tuple(outputs.shape[-2:]), self.sigma)
        is_labeled = keypoints[..., 2] > 0
        errors = (outputs.float() - targets).square().mean((2, 3))  # [N, J]
        return LossTerm((errors * is_labeled).sum(), is_labeled.sum())


def gaussian_heatmaps(points: Tensor, size: tuple[int, int], map_size: tuple[int, ...], sigma: float) -> Tensor:
    """Maps [N, J, h, w] with a Gaussian at each of the points [N, J, 2], which are pixels of images of that size."""
    (height, width), (rows, columns) = size, map_size
    x, y = (points * constant([columns / width, rows / height], points.device, points.dtype)).unbind(-1)  # [N, J]
    across = torch.arange(columns, device=points.device) + 0.5 - x[..., None]  # [N, J, w]
    down = torch.arange(rows, device=points.device) + 0.5 - y[..., None]
    gaussians = [(distances.square() / (-2 * sigma**2)).exp() for distances in (down, across)]
    return gaussians[0][..., :, None] * gaussians[1][..., None, :]


def stack_keypoints(batch: Batch) -> Tensor:
    """The keypoints of each sample's one person, [N, J, 3]; all not labeled where there is none."""
    if "keypoints" not in batch:
        raise DataError("these samples have no keypoints; use dataset: keypoints, or coco with keypoints: true")
    return torch.stack([only_person(each, batch, index) for index, each in enumerate(batch["keypoints"])])


def only_person(keypoints: Tensor, batch: Batch, index: int) -> Tensor:
    """The keypoints [J, 3] of [K, J, 3] with at most one person."""
    if len(keypoints) > 1:
        raise DataError(
            f"sample {int(batch.ids[index])} has {len(keypoints)} people, expected one in each; with dataset: coco, set"
            " per_object to true"
        )
    return keypoints[0] if len(keypoints) else keypoints.new_zeros(keypoints.shape[1:])
