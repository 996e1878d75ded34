"""Predictions for every pixel: test-time augmentation, sliding windows, and maps at the size of the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.data.batch import Batch, crop_padding
from paceline.metrics.metric import LossMetrics, Metric, MetricOf
from paceline.tasks.task import Task

Forward = Callable[[Tensor], Tensor]
"""Logits [N, C, H, W] of images [N, 3, H, W]."""


class PixelPrediction(NamedTuple):
    """A model's predictions, as losses need them, and as metrics and files do."""

    logits: Tensor
    """[N, C, H, W], at the size of the batch's masks."""
    maps: list[Tensor]
    """Of each sample, [H, W], at the size of its truth."""


def pixel_metrics(task: Task, map_metrics: Sequence[Metric]) -> list[Metric]:
    """The losses at the size of the batch's masks, and these metrics at the size of the truth."""
    losses = MetricOf(LossMetrics(task.loss_functions, task.weights), lambda found, batch: (found.logits, batch))
    return [losses, *(MetricOf(metric, _maps_and_truths) for metric in map_metrics)]


def _maps_and_truths(predictions: PixelPrediction, batch: Batch) -> tuple[list[Tensor], Batch]:
    """Lists, of maps and, as "mask", of truths."""
    return predictions.maps, Batch(batch, mask=truths(batch))


@dataclass(frozen=True)
class TTA:
    """Test-time augmentation: logits averaged over flips, scales and sliding windows.

    Flips and scales are averaged as probabilities; the result is the logits of the average. Overlapping windows are
    averaged as logits.
    """

    flip: bool = False
    scales: Sequence[float] = (1.0,)
    window: Sequence[int] | None = None
    stride: Sequence[int] | None = None

    def predict(self, forward: Forward, batch: Batch) -> Tensor:
        """Logits [N, C, H, W] at the size of a batch's images; views are made of each image without its padding."""
        images: Tensor = batch["image"]
        if batch.image_sizes is None or self == TTA():
            return self(forward, images)
        each = [self(forward, batch.image(index)[None]) for index in range(len(images))]
        height, width = images.shape[-2:]
        return torch.cat([F.pad(own, (0, width - own.shape[-1], 0, height - own.shape[-2])) for own in each])

    def __call__(self, forward: Forward, images: Tensor) -> Tensor:
        """Logits [N, C, H, W] at the size of the images."""
        size = images.shape[-2:]
        views = [resize(self._slide(forward, view), size) for view in self._scaled(images)]
        if self.flip:
            views += [resize(self._slide(forward, view), size).flip(-1) for view in self._scaled(images.flip(-1))]
        if len(views) == 1:
            return views[0]
        total = torch.zeros_like(views[0])
        for logits in views:
            total += logits.softmax(1)
        return total.div_(len(views)).clamp_(min=torch.finfo(total.dtype).tiny).log_()

    def _scaled(self, images: Tensor) -> Iterator[Tensor]:
        for scale in self.scales:
            yield resize(images, [max(1, round(side * scale)) for side in images.shape[-2:]])

    def _slide(self, forward: Forward, images: Tensor) -> Tensor:
        if self.window is None:
            return resize(forward(images).float(), images.shape[-2:])
        height, width = (min(each) for each in zip(self.window, images.shape[-2:], strict=True))
        stride = self.stride or self.window
        total, counts = images.new_zeros(()), images.new_zeros(images.shape[-2:])
        for top in window_starts(images.shape[-2], height, stride[0]):
            for left in window_starts(images.shape[-1], width, stride[1]):
                part = (..., slice(top, top + height), slice(left, left + width))
                logits = resize(forward(images[part]).float(), (height, width))
                if not total.ndim:
                    total = logits.new_zeros(*logits.shape[:2], *images.shape[-2:])
                total[part] += logits
                counts[part] += 1
        return total / counts


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows along a side begin: `stride` apart, and the last one flush with the end."""
    last = length - window
    return [*range(0, last, stride), last]


def resize(planes: Tensor, size: Sequence[int]) -> Tensor:
    """Planes [N, C, H, W] interpolated to a height and width."""
    if planes.shape[-2:] == tuple(size):
        return planes
    return F.interpolate(planes, size=tuple(size), mode="bilinear", align_corners=False)


def main_output(outputs: Any) -> Tensor:
    """The logits [N, C, H, W] of a model that returns them, or a dict with them as "out"."""
    logits: Tensor = outputs["out"] if isinstance(outputs, dict) else outputs
    if logits.ndim != 4:
        expected = "expected logits [N, C, H, W], as unet, fpn and torchvision/segmentation/NAME give"
        raise RecipeError(f"model: got outputs of shape {list(logits.shape)}, {expected}")
    return logits


def truths(batch: Batch) -> list[Tensor]:
    """The mask of each sample, [H, W], at its original size where the batch has that."""
    if "truth" in batch:
        found: list[Tensor] = batch["truth"]
        return found
    return [crop_padding(mask, batch, index) for index, mask in enumerate(batch["mask"])]


def warp_to_truth(planes: Tensor, batch: Batch) -> Iterator[Tensor]:
    """Planes [N, C, H, W] of the images, sample by sample as [C, h, w] on the pixels of its truth."""
    thetas = _sampling_matrices(batch)
    for index, truth in enumerate(truths(batch)):
        height, width = truth.shape
        own = crop_padding(planes[index : index + 1], batch, index)
        if thetas is None or torch.allclose(thetas[index], torch.eye(2, 3, dtype=torch.float64), atol=1e-5):
            yield resize(own, (height, width))[0]
        else:
            theta = thetas[index : index + 1].to(own)
            grid = F.affine_grid(theta, [1, 1, height, width], align_corners=False)
            yield F.grid_sample(own, grid, padding_mode="border", align_corners=False)[0]


def _sampling_matrices(batch: Batch) -> Tensor | None:
    """`affine_grid`'s theta [N, 2, 3] from each truth to its image; None if masks are the truth."""
    if "truth" not in batch:
        return None
    sizes = batch.image_sizes or [batch["image"].shape[-2:]]
    inverse = batch["matrix"].cpu().double()  # [N, 2, 3], from the image to the truth, in pixels
    linear = torch.linalg.inv(inverse[:, :, :2])
    shift = -(linear @ inverse[:, :, 2:])  # [N, 2, 1]
    truth_sizes = torch.tensor([[*reversed(truth.shape)] for truth in batch["truth"]], dtype=torch.float64)
    image_size = torch.tensor([[[width], [height]] for height, width in sizes], dtype=torch.float64)
    linear = linear * truth_sizes[:, None, :] / image_size
    shift = linear.sum(2, keepdim=True) + 2 * shift / image_size - 1
    return torch.cat([linear, shift], 2)
