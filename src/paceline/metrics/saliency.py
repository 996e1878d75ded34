"""Metrics for maps of what stands out in an image: batch["mask"] against predictions from 0 to 1.

They agree with those of PySODMetrics. Each is measured image by image, at the size of the mask, and averaged over
images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from paceline.core.errors import DataError, RecipeError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.metrics.metric import Figures, State
from paceline.metrics.saliency_curves import (
    LEVELS,
    Mask,
    Overlap,
    Values,
    balanced_error,
    e_measure,
    f_measure,
    intersection_over_union,
    overlap_at,
    overlaps,
)
from paceline.metrics.saliency_structure import s_measure, weighted_f

Figure = Literal[
    "mae", "max_f", "mean_f", "adaptive_f", "weighted_f", "s_measure", "max_e", "mean_e", "adaptive_e", "iou", "ber",
]  # fmt: skip
FIGURES: tuple[Figure, ...] = get_args(Figure)
"""All metrics, in the order in which they are given."""
_FOREGROUND = 128  # a mask's pixel is salient above this
_CURVES = {"f_curve": ("max_f", "mean_f"), "e_curve": ("max_e", "mean_e")}
_ERRORS = ("mae", "ber")
_UNIT = 2**40  # of curves: sums of whole numbers have the same bits in any order, and take no room for each image


@dataclass(frozen=True)
class _Image:
    """One prediction with its mask, and what several metrics are made from."""

    values: Values
    truth: Mask

    @cached_property
    def errors(self) -> Values:
        errors = self.values - self.truth
        return np.abs(errors, out=errors)

    @cached_property
    def curve(self) -> Overlap:
        return overlaps(self.values, self.truth)

    @cached_property
    def adaptive(self) -> Overlap:
        return overlap_at(self.values >= min(2 * self.values.mean(), 1.0), self.truth)

    @cached_property
    def halved(self) -> Overlap:
        return overlap_at(self.values > 0.5, self.truth)


_MEASURES: dict[str, Callable[[_Image], float | Values]] = {
    "mae": lambda image: float(image.errors.mean()),
    "f_curve": lambda image: f_measure(image.curve),
    "adaptive_f": lambda image: float(f_measure(image.adaptive)),
    "weighted_f": lambda image: weighted_f(image.errors, image.truth),
    "s_measure": lambda image: s_measure(image.values, image.truth),
    "e_curve": lambda image: e_measure(image.curve),
    "adaptive_e": lambda image: float(e_measure(image.adaptive)),
    "iou": lambda image: float(intersection_over_union(image.halved)),
    "ber": lambda image: float(balanced_error(image.halved)),
}


@register.metric("saliency")
class Saliency:
    """The usual metrics of saliency maps; `metrics` chooses fewer, and what only others need is not computed.

    "mae" is the mean absolute error. "max_f" and "mean_f" (β² = 0.3), "max_e" and "mean_e" are taken from the mean
    curve over 256 thresholds, "adaptive_f" and "adaptive_e" at twice each prediction's mean. "weighted_f" and
    "s_measure" look at where errors are; "iou" and "ber" (balanced error rate) are at a threshold of 0.5.

    With `stretch`, as is usual, each prediction is first stretched so that its least value becomes 0 and its greatest
    1, unless all are the same. Values that are not numbers count as entirely wrong.
    """

    def __init__(
        self, metrics: Annotated[Sequence[Figure], Field(min_length=1)] = FIGURES, stretch: bool = True
    ) -> None:
        self.chosen = [name for name in FIGURES if name in metrics]
        self.stretch = stretch
        self.higher_is_better: dict[str, bool] = {name: name not in _ERRORS for name in self.chosen}
        self._measures = {
            name: measure
            for name, measure in _MEASURES.items()
            if any(metric in self.chosen for metric in _CURVES.get(name, (name,)))
        }

    def update(self, predictions: Tensor | Sequence[Tensor], batch: Batch) -> State:
        """What each image measures; predictions and masks are [N, H, W], or lists of N where sizes differ.

        Predictions are uint8 from 0 to 255 or floats from 0 to 1, and may have a channel; masks are uint8, salient
        above 128.
        """
        state: State = {"samples": torch.tensor(len(predictions))}
        images = [
            _Image(prepared(prediction, truth, self.stretch), truth) for prediction, truth in _pairs(predictions, batch)
        ]
        for name, measure in self._measures.items():
            values = np.asarray([measure(image) for image in images], np.float64)
            if name in _CURVES:
                values = np.rint(values.reshape(-1, LEVELS) * _UNIT).astype(np.int64).sum(axis=0)
            state[name] = torch.from_numpy(values)
        return state

    def compute(self, state: State) -> Figures:
        """Means over images, from 0 to 1."""
        num_samples = int(state["samples"])
        metrics: Figures = {}
        for name in self._measures:
            values = state[name].tolist()
            if name in _CURVES:
                greatest, mean = _CURVES[name]
                metrics[greatest] = max(values) / (_UNIT * num_samples)
                metrics[mean] = sum(values) / (_UNIT * num_samples * LEVELS)
            else:
                metrics[name] = math.fsum(values) / num_samples
        return {name: metrics[name] for name in self.chosen}


def prepared(prediction: npt.NDArray[Any], truth: Mask, stretch: bool) -> Values:
    """A prediction as float64 from 0 to 1, stretched to that range if wanted."""
    values: Values = prediction / 255 if prediction.dtype == np.uint8 else prediction.astype(np.float64)
    low, high = values.min(), values.max()
    unknown = np.isnan(values) if np.isnan(low) else None
    if unknown is not None:
        known = values[~unknown]
        low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
    if low < 0 or high > 1:
        found = f"got values from {low:g} to {high:g}"
        raise RecipeError(f"evaluate.metrics: saliency is for maps from 0 to 1, as the task saliency has, {found}")
    if stretch and low != high:
        values -= low
        values /= high - low
    return values if unknown is None else np.where(unknown, ~truth, values)


def _pairs(predictions: Tensor | Sequence[Tensor], batch: Batch) -> list[tuple[npt.NDArray[Any], Mask]]:
    pairs = []
    for number, (prediction, mask) in enumerate(zip(predictions, batch["mask"], strict=True)):
        levels = prediction.detach().squeeze(0) if prediction.ndim == 3 else prediction.detach()
        if levels.shape != mask.shape:
            found, expected = (" x ".join(map(str, each.shape)) for each in (levels, mask))
            raise DataError(
                f"saliency: the prediction for sample {int(batch.ids[number])} is {found}, but its mask is {expected};"
                " metrics are taken at the size of the mask"
            )
        values = levels if levels.dtype in (torch.uint8, torch.float64) else levels.float()
        pairs.append((values.cpu().numpy(), mask.cpu().numpy() > _FOREGROUND))
    return pairs
