"""Saliency metrics: maps from 0 to 1 against batch["mask"], image by image, averaged over images.

They equal those of PySODMetrics, which is not used because it pins numpy; a test holds them equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, get_args

import cv2
import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from paceline.core.errors import DataError, RecipeError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.metrics.metric import MetricValues, State

Values = npt.NDArray[np.float64]
"""A map from 0 to 1 [H, W], or values derived from it."""
Mask = npt.NDArray[np.bool_]
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
_EPSILON = float(np.finfo(np.float64).eps)  # added to denominators
_RADIUS = 3  # of the Gaussian filter, in pixels
_SIGMA = 5.0
_HALF_LIFE = 5.0  # pixels over which the weight of a false positive covers half of what is left to 2
_PAD = math.isqrt(2 * _RADIUS**2)  # the greatest distance inside the filter
_OFFSETS = sorted(
    ((row, column) for row in range(-_PAD, _PAD + 1) for column in range(-_PAD, _PAD + 1)),
    key=lambda offset: (offset[0] ** 2 + offset[1] ** 2, offset[1], offset[0]),
)
"""Rows and columns to the neighbors of a pixel: the nearest first, of these the leftmost, then the uppermost."""


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
    aligned = 2 * deviation * true_deviation / (deviation**2 + true_deviation**2 + _EPSILON)
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


def s_measure(prediction: Values, truth: Mask) -> float:
    """The structure measure: the mean of object and region similarity; for a constant mask, the mean agreement."""
    fraction = float(truth.mean())
    if fraction in (0.0, 1.0):
        mean = float(prediction.mean())
        return mean if fraction else 1 - mean
    return max(0.0, 0.5 * _object_similarity(prediction, truth, fraction) + 0.5 * _region_similarity(prediction, truth))


def _object_similarity(prediction: Values, truth: Mask, fraction: float) -> float:
    inside, outside = prediction[truth], prediction[~truth]
    mean, ground_mean = float(inside.mean()), float(outside.mean())
    object_similarity = _uniformity(mean, _std(inside, mean))
    ground_similarity = _uniformity(1 - ground_mean, _std(outside, ground_mean))
    return fraction * object_similarity + (1 - fraction) * ground_similarity


def _uniformity(mean: float, std: float) -> float:
    """Near 1 for values that are high and similar."""
    return 2 * mean / (mean**2 + 1 + std + _EPSILON)


def _std(values: Values, mean: float) -> float:
    """The standard deviation; 0 for a single value."""
    return math.sqrt(_squared_deviations(values, mean) / max(1, values.size - 1))


def _squared_deviations(values: Values, mean: float) -> float:
    deviations = values - mean
    deviations *= deviations
    return float(deviations.sum())


def _region_similarity(prediction: Values, truth: Mask) -> float:
    """The similarity of the four quadrants around the mask's centroid, weighted by their areas."""
    height, width = truth.shape
    row, column = (_centroid(truth.sum(axis=axis)) + 1 for axis in (1, 0))
    similarity = 0.0
    for rows in (slice(0, row), slice(row, height)):
        for columns in (slice(0, column), slice(column, width)):
            part = truth[rows, columns]
            if part.size:
                similarity += part.size / truth.size * _ssim(prediction[rows, columns], part)
    return similarity


def _centroid(salient: Values) -> int:
    """The rounded mean index of salient pixels, from their number in each row or column."""
    return round(int(salient @ np.arange(len(salient))) / int(salient.sum()))


def _ssim(prediction: Values, truth: Mask) -> float:
    """Structural similarity of two regions without its stabilizing constants.

    Rounding decides whether the variance of a constant region is exactly 0, and so whether its similarity is 1 or 0.
    The variance is therefore computed by the steps of the reference implementation.
    """
    size, num_salient = truth.size, int(np.count_nonzero(truth))
    mean, true_mean = float(prediction.mean()), num_salient / size
    variance = _squared_deviations(prediction, mean)
    true_variance = true_mean * (size - num_salient)
    is_mixed = 0 < num_salient < size
    covariance = float(prediction.sum(where=truth)) - num_salient * mean if is_mixed else 0.0
    numerator = 4 * mean * true_mean * covariance / (size - 1 + _EPSILON)
    denominator = (mean**2 + true_mean**2) * (variance + true_variance) / (size - 1 + _EPSILON)
    if numerator != 0:
        return numerator / (denominator + _EPSILON)
    return 1.0 if denominator == 0 else 0.0


def weighted_f(errors: Values, truth: Mask) -> float:
    """The weighted F-measure with β² = 1, from absolute errors; 0 if nothing is salient."""
    num_salient = int(np.count_nonzero(truth))
    if num_salient == 0:
        return 0.0
    fn, fp = _false_negatives(errors, truth), _false_positives(errors, ~truth)
    tp = num_salient - fn
    recall = 1 - fn / num_salient
    precision = tp / (tp + fp + _EPSILON)
    return 2 * recall * precision / (recall + precision + _EPSILON)


def _false_negatives(errors: Values, truth: Mask) -> float:
    """The summed errors of salient pixels, each at most the smoothed error there."""
    weights = np.exp(-(np.arange(-_RADIUS, _RADIUS + 1) ** 2) / (2 * _SIGMA**2))
    weights /= weights.sum()
    extended = _extend(errors, truth)
    smooth = cv2.sepFilter2D(extended, cv2.CV_64F, weights, weights, borderType=cv2.BORDER_CONSTANT)
    return float(np.minimum(errors, smooth)[truth].sum())


def _extend(errors: Values, truth: Mask) -> Values:
    """The errors of salient pixels, and of others within the filter of one that of the nearest; 0 elsewhere.

    OpenCV's distance transform with labels is approximate, so neighbors are looked up here.
    """
    known, salient = np.pad(np.where(truth, errors, 0), _PAD), np.pad(truth, _PAD)
    extended = known.copy()
    is_near = cv2.dilate(truth.view(np.uint8), np.ones((2 * _RADIUS + 1, 2 * _RADIUS + 1), np.uint8)) > 0
    rows, columns = np.stack((is_near & ~truth).nonzero()) + _PAD
    for down, right in _OFFSETS:
        found = salient[rows + down, columns + right]
        extended[rows[found], columns[found]] = known[rows[found] + down, columns[found] + right]
        rows, columns = rows[~found], columns[~found]
    return extended[_PAD:-_PAD, _PAD:-_PAD]


def _false_positives(errors: Values, ground: Mask) -> float:
    """The summed errors of other pixels, weighted from 1 beside the object to 2 far away."""
    distance = cv2.distanceTransform(ground.view(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    # The last bits of these distances depend on memory alignment; their squares are integers.
    exact = np.sqrt(np.rint(np.square(distance, dtype=np.float64)))
    weights = 2 - np.exp(exact * (math.log(0.5) / _HALF_LIFE))
    return float((weights * errors).sum(where=ground))


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
