"""Saliency metrics: maps from 0 to 1 against batch["mask"], image by image, averaged over images.

They equal those of PySODMetrics, which is not used because it pins numpy; a test holds them equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from paceline.core.errors import DataError, RecipeError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.metrics.metric import MetricValues, State
from paceline.metrics.saliency_structure import EPSILON, Mask, Values, s_measure, weighted_f

SaliencyValue = Literal[
    "mae", "max_f", "mean_f", "adaptive_f", "weighted_f", "s_measure", "max_e", "mean_e", "adaptive_e", "iou", "ber",
]  # fmt: skip
SALIENCY_VALUES: tuple[SaliencyValue, ...] = get_args(SaliencyValue)
"""All values, in the order in which they are reported."""
_FOREGROUND = 128  # a mask's pixel is salient above this
_LEVELS = 256  # thresholds of a curve: 0, 1/255, … 1
_CURVES = {"f_curve": ("max_f", "mean_f"), "e_curve": ("max_e", "mean_e")}
_ERRORS = ("mae", "ber")
_UNIT = 2**40  # resolution of curves: sums of integers are bit-identical in any order, and need no row per image
_BETA_SQUARED = 0.3


@register.metric("saliency")
class Saliency:
    """The usual values of saliency maps; `metrics` selects some of them, the others are not computed.

    "mae" is the mean absolute error. "max_f" and "mean_f" (β² = 0.3), "max_e" and "mean_e" come from the mean curve
    over 256 thresholds, "adaptive_f" and "adaptive_e" use twice the mean of each map as threshold. "weighted_f" and
    "s_measure" weigh errors by their position; "iou" and "ber" (balanced error rate) use the threshold 0.5.

    With `stretch`, as is usual, each map is first scaled to the range 0 to 1, unless it is constant. A NaN counts as
    entirely wrong.
    """

    def __init__(
        self, metrics: Annotated[Sequence[SaliencyValue], Field(min_length=1)] = SALIENCY_VALUES, stretch: bool = True
    ) -> None:
        self.selected = [name for name in SALIENCY_VALUES if name in metrics]
        self.stretch = stretch
        self.higher_is_better: dict[str, bool] = {name: name not in _ERRORS for name in self.selected}
        self._measures = {
            name: measure
            for name, measure in _MEASURES.items()
            if any(value in self.selected for value in _CURVES.get(name, (name,)))
        }

    def update(self, predictions: Tensor | Sequence[Tensor], batch: Batch) -> State:
        """The values of each image; predictions and masks are [N, H, W], or lists of N where sizes differ.

        Predictions are uint8 from 0 to 255 or floats from 0 to 1, and may have a channel; masks are uint8, salient
        above 128.
        """
        state: State = {"samples": torch.tensor(len(predictions))}
        images = [_Image(normalize_map(map_, truth, self.stretch), truth) for map_, truth in _pairs(predictions, batch)]
        for name, measure in self._measures.items():
            values = np.asarray([measure(image) for image in images], np.float64)
            if name in _CURVES:
                values = np.rint(values.reshape(-1, _LEVELS) * _UNIT).astype(np.int64).sum(axis=0)
            state[name] = torch.from_numpy(values)
        return state

    def compute(self, state: State) -> MetricValues:
        num_samples = int(state["samples"])
        means: MetricValues = {}
        for name in self._measures:
            values = state[name].tolist()
            if name in _CURVES:
                max_name, mean_name = _CURVES[name]
                means[max_name] = max(values) / (_UNIT * num_samples)
                means[mean_name] = sum(values) / (_UNIT * num_samples * _LEVELS)
            else:
                means[name] = math.fsum(values) / num_samples
        return {name: means[name] for name in self.selected}


def normalize_map(prediction: npt.NDArray[Any], truth: Mask, stretch: bool) -> Values:
    """A map as float64 from 0 to 1, stretched to that range on request; NaN becomes entirely wrong."""
    values: Values = prediction / 255 if prediction.dtype == np.uint8 else prediction.astype(np.float64)
    is_nan = np.isnan(values)
    known = values[~is_nan] if is_nan.any() else values
    low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
    if low < 0 or high > 1:
        raise RecipeError(
            f"evaluate.metrics: saliency expects maps from 0 to 1, got values from {low:g} to {high:g}; use it with the"
            " task saliency"
        )
    if stretch and low != high:
        values = (values - low) / (high - low)
    return np.where(is_nan, ~truth, values) if known is not values else values


def _pairs(predictions: Tensor | Sequence[Tensor], batch: Batch) -> list[tuple[npt.NDArray[Any], Mask]]:
    pairs = []
    for index, (prediction, mask) in enumerate(zip(predictions, batch["mask"], strict=True)):
        levels = prediction.detach().squeeze(0) if prediction.ndim == 3 else prediction.detach()
        if levels.shape != mask.shape:
            found, expected = (" x ".join(map(str, each.shape)) for each in (levels, mask))
            raise DataError(
                f"saliency: sample {int(batch.ids[index])}: the prediction is {found}, its mask {expected}; the task"
                " must resize predictions to the masks"
            )
        values = levels if levels.dtype in (torch.uint8, torch.float64) else levels.float()
        pairs.append((values.cpu().numpy(), mask.cpu().numpy() > _FOREGROUND))
    return pairs


class _Confusion(NamedTuple):
    """Pixel counts at one threshold [] or at many [T]; positives and negatives are those of the mask."""

    tp: npt.NDArray[np.int64]
    fp: npt.NDArray[np.int64]
    num_positive: int
    num_negative: int


@dataclass(frozen=True)
class _Image:
    """A map with its mask, and what several values are computed from."""

    values: Values
    truth: Mask

    @cached_property
    def errors(self) -> Values:
        return np.asarray(np.abs(self.values - self.truth))

    @cached_property
    def curve(self) -> _Confusion:
        """The counts at all thresholds, from a joint histogram; values are rounded down to a threshold."""
        cells = (self.values * (_LEVELS - 1)).astype(np.uint8) + self.truth * np.uint16(_LEVELS)
        histograms = np.bincount(cells.ravel(), minlength=2 * _LEVELS).reshape(2, _LEVELS)
        fp, tp = histograms[:, ::-1].cumsum(axis=1)[:, ::-1]
        return _Confusion(tp, fp, *self._areas)

    @cached_property
    def adaptive(self) -> _Confusion:
        return self._confusion(self.values >= min(2 * self.values.mean(), 1.0))

    @cached_property
    def half(self) -> _Confusion:
        return self._confusion(self.values > 0.5)

    @cached_property
    def _areas(self) -> tuple[int, int]:
        num_positive = int(np.count_nonzero(self.truth))
        return num_positive, self.truth.size - num_positive

    def _confusion(self, predicted: Mask) -> _Confusion:
        tp = np.count_nonzero(predicted & self.truth)
        return _Confusion(np.asarray(tp), np.asarray(np.count_nonzero(predicted) - tp), *self._areas)


def _f_measure(counts: _Confusion) -> Values:
    """The F-measure with β² = 0.3; 0 without true positives."""
    precision = _ratio(counts.tp, counts.tp + counts.fp)
    recall = _ratio(counts.tp, np.asarray(counts.num_positive))
    return _ratio((1 + _BETA_SQUARED) * precision * recall, _BETA_SQUARED * precision + recall)


def _e_measure(counts: _Confusion) -> Values:
    """The enhanced-alignment measure; for a constant mask, the fraction of correct pixels.

    As published, the sum is divided by one less than the number of pixels (by 1 for a single pixel).
    """
    tp, fp, num_positive, num_negative = counts
    size = num_positive + num_negative
    predicted = tp + fp
    if num_positive == 0:
        total = np.asarray(size - predicted, np.float64)
    elif num_negative == 0:
        total = np.asarray(predicted, np.float64)
    else:
        mean, true_mean = predicted / size, num_positive / size
        total = (
            tp * _alignment(1 - mean, 1 - true_mean)
            + fp * _alignment(1 - mean, -true_mean)
            + (num_positive - tp) * _alignment(-mean, 1 - true_mean)
            + (num_negative - fp) * _alignment(-mean, -true_mean)
        )
    return total / max(1, size - 1)


def _alignment(deviation: Values, true_deviation: float) -> Values:
    aligned = 2 * deviation * true_deviation / (deviation**2 + true_deviation**2 + EPSILON)
    return np.asarray((aligned + 1) ** 2 / 4)


def _iou(counts: _Confusion) -> Values:
    return _ratio(counts.tp, counts.num_positive + counts.fp)


def _balanced_error(counts: _Confusion) -> Values:
    """1 minus the mean of the true positive and the true negative rate; a rate without pixels is 0."""
    tpr = _ratio(counts.tp, np.asarray(counts.num_positive))
    tnr = _ratio(counts.num_negative - counts.fp, np.asarray(counts.num_negative))
    return 1 - 0.5 * (tpr + tnr)


def _ratio(numerator: npt.NDArray[np.generic], denominator: npt.NDArray[np.generic]) -> Values:
    """0 where the denominator is 0: the numerator is 0 there too."""
    return np.asarray(numerator / np.where(denominator == 0, 1, denominator))


_MEASURES: dict[str, Callable[[_Image], float | Values]] = {
    "mae": lambda image: float(image.errors.mean()),
    "f_curve": lambda image: _f_measure(image.curve),
    "adaptive_f": lambda image: float(_f_measure(image.adaptive)),
    "weighted_f": lambda image: weighted_f(image.errors, image.truth),
    "s_measure": lambda image: s_measure(image.values, image.truth),
    "e_curve": lambda image: _e_measure(image.curve),
    "adaptive_e": lambda image: float(_e_measure(image.adaptive)),
    "iou": lambda image: float(_iou(image.half)),
    "ber": lambda image: float(_balanced_error(image.half)),
}
