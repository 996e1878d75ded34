"""A prediction for every pixel: asked for in several views, and brought to the size of the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.data.batch import Batch
from paceline.metrics.metric import Metric, MetricValues, State

Ask = Callable[[Tensor], Tensor]
"""Logits [N, C, H, W] of images [N, 3, H, W]."""


class PixelPrediction(NamedTuple):
    """What a model says of each pixel, twice: as losses take it, and as metrics and files do."""

    logits: Tensor
    """[N, C, H, W], at the size of the batch's masks."""
    maps: list[Tensor]
    """Of each sample, [H, W], at the size of its truth."""


@dataclass(frozen=True)
class _OfPart:
    """A metric that is given one part of a prediction."""

    metric: Metric
    higher_is_better: Mapping[str, bool] = field(default_factory=dict, init=False)

    @property
    def wrapped(self) -> Sequence[Metric]:
        """The metric, whose values these are."""
        return [self.metric]

    def compute(self, state: State) -> MetricValues:
        """The metric's own."""
        return self.metric.compute(state)


class OfLogits(_OfPart):
    """A metric of logits, beside the masks of the batch."""

    def update(self, predictions: PixelPrediction, batch: Batch) -> State:
        """The state of one batch."""
        return self.metric.update(predictions.logits, batch)


class OfMaps(_OfPart):
    """A metric of maps at the size of the truth: it is given lists, of maps and as "mask" of truths."""

    def update(self, predictions: PixelPrediction, batch: Batch) -> State:
        """The state of one batch."""
        return self.metric.update(predictions.maps, Batch(batch, mask=truths(batch)))


@dataclass(frozen=True)
class Views:
    """Asks a model for the logits of images once, or mirrored and at further sizes, or window by window.

    Several views are averaged as probabilities over classes, and given as logits that stand for the average. Where
    windows overlap, their logits are averaged.
    """

    flip: bool = False
    scales: Sequence[float] = (1.0,)
    window: Sequence[int] | None = None
    stride: Sequence[int] | None = None

    def __call__(self, ask: Ask, images: Tensor) -> Tensor:
        """Logits [N, C, H, W] at the size of the images."""
        size = images.shape[-2:]
        asked = [resized(self._ask_windows(ask, view), size) for view in self._resized(images)]
        if self.flip:
            mirrored = self._resized(images.flip(-1))
            asked += [resized(self._ask_windows(ask, view), size).flip(-1) for view in mirrored]
        if len(asked) == 1:
            return asked[0]
        total = torch.zeros_like(asked[0])
        for logits in asked:
            total += logits.softmax(1)
        return total.div_(len(asked)).clamp_(min=torch.finfo(total.dtype).tiny).log_()

    def _resized(self, images: Tensor) -> Iterator[Tensor]:
        for scale in self.scales:
            yield resized(images, [max(1, round(side * scale)) for side in images.shape[-2:]])

    def _ask_windows(self, ask: Ask, images: Tensor) -> Tensor:
        if self.window is None:
            return resized(ask(images).float(), images.shape[-2:])
        height, width = (min(each) for each in zip(self.window, images.shape[-2:], strict=True))
        stride = self.stride or self.window
        total, times = images.new_zeros(()), images.new_zeros(images.shape[-2:])
        for top in starts(images.shape[-2], height, stride[0]):
            for left in starts(images.shape[-1], width, stride[1]):
                part = (..., slice(top, top + height), slice(left, left + width))
                logits = resized(ask(images[part]).float(), (height, width))
                if not total.ndim:
                    total = logits.new_zeros(*logits.shape[:2], *images.shape[-2:])
                total[part] += logits
                times[part] += 1
        return total / times


def starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows along a side begin: `stride` apart, and the last one at the end."""
    last = length - window
    return [*range(0, last, stride), last]


def resized(planes: Tensor, size: Sequence[int]) -> Tensor:
    """Planes [N, C, H, W] interpolated to a height and width."""
    if planes.shape[-2:] == tuple(size):
        return planes
    return F.interpolate(planes, size=tuple(size), mode="bilinear", align_corners=False)


def main_output(outputs: Any) -> Tensor:
    """The logits of a model that gives them alone, or as "out" beside those of further heads."""
    logits: Tensor = outputs["out"] if isinstance(outputs, dict) else outputs
    if logits.ndim != 4:
        raise RecipeError(f"model: gives outputs of shape {list(logits.shape)}, expected logits for each pixel")
    return logits


def truths(batch: Batch) -> list[Tensor]:
    """The mask of each sample, [H, W], as it was read if that was kept."""
    found: list[Tensor] = batch["truth"] if "truth" in batch else list(batch["mask"])
    return found


def at_truth(planes: Tensor, batch: Batch) -> Iterator[Tensor]:
    """Planes [N, C, H, W] of the images, sample by sample as [C, h, w], each where its truth's pixels lie."""
    places = _places(batch)
    for number, truth in enumerate(truths(batch)):
        height, width = truth.shape
        own = planes[number : number + 1]
        if places is None or torch.allclose(places[number], torch.eye(2, 3, dtype=torch.float64), atol=1e-5):
            yield resized(own, (height, width))[0]
        else:
            theta = places[number : number + 1].to(own)
            grid = F.affine_grid(theta, [1, 1, height, width], align_corners=False)
            yield F.grid_sample(own, grid, padding_mode="border", align_corners=False)[0]


def _places(batch: Batch) -> Tensor | None:
    """For each sample the map [2, 3] from its truth to its image, both spanning -1 to 1; None where they are one."""
    if "truth" not in batch:
        return None
    rows, columns = batch["image"].shape[-2:]
    back = batch["matrix"].double().cpu()  # [N, 2, 3], from the image to the truth, in pixels
    linear = torch.linalg.inv(back[:, :, :2])
    shift = -(linear @ back[:, :, 2:])  # [N, 2, 1]
    whole = torch.tensor([[*reversed(truth.shape)] for truth in batch["truth"]], dtype=torch.float64)  # width, height
    sides = torch.tensor([[columns], [rows]], dtype=torch.float64)
    linear = linear * whole[:, None, :] / sides
    shift = linear.sum(2, keepdim=True) + 2 * shift / sides - 1
    return torch.cat([linear, shift], 2)
