"""S-measure and weighted F-measure of saliency maps."""

from __future__ import annotations

import math

import cv2
import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
"""A map from 0 to 1 [H, W], or values derived from it."""
Mask = npt.NDArray[np.bool_]
EPSILON = float(np.finfo(np.float64).eps)
"""Added to denominators."""


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
    return 2 * mean / (mean**2 + 1 + std + EPSILON)


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
    numerator = 4 * mean * true_mean * covariance / (size - 1 + EPSILON)
    denominator = (mean**2 + true_mean**2) * (variance + true_variance) / (size - 1 + EPSILON)
    if numerator != 0:
        return numerator / (denominator + EPSILON)
    return 1.0 if denominator == 0 else 0.0


Distances = npt.NDArray[np.float32]

_RADIUS = 3  # of the Gaussian filter, in pixels
_SIGMA = 5.0
_MAX_SQUARED = 2 * _RADIUS**2  # the greatest squared distance inside the filter
_PAD = math.isqrt(_MAX_SQUARED)  # rows or columns at that distance
_HALF_LIFE = 5.0  # pixels over which the weight of a false positive covers half of what is left to 2


def weighted_f(errors: Values, truth: Mask) -> float:
    """The weighted F-measure with β² = 1, from absolute errors; 0 if nothing is salient."""
    num_salient = int(np.count_nonzero(truth))
    if num_salient == 0:
        return 0.0
    ground = ~truth
    distance: Distances = cv2.distanceTransform(ground.view(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    fn = _false_negatives(errors, truth, distance)
    fp = _false_positives(errors, ground, distance)
    tp = num_salient - fn
    recall = 1 - fn / num_salient
    precision = tp / (tp + fp + EPSILON)
    return 2 * recall * precision / (recall + precision + EPSILON)


def _false_negatives(errors: Values, truth: Mask, distance: Distances) -> float:
    """The summed errors of salient pixels, each at most the smoothed error there."""
    rows, columns = _extent(truth, axis=1), _extent(truth, axis=0)
    errors, salient = errors[rows, columns], truth[rows, columns]
    around = cv2.copyMakeBorder(distance, _PAD, _PAD, _PAD, _PAD, cv2.BORDER_CONSTANT, value=0)
    around = around[rows.start : rows.stop + 2 * _PAD, columns.start : columns.stop + 2 * _PAD]
    extended = _extend(errors, salient, around)
    smooth = cv2.sepFilter2D(extended, cv2.CV_64F, _gaussian, _gaussian)[_PAD:-_PAD, _PAD:-_PAD]
    return float(np.minimum(errors, smooth)[salient].sum())


def _extent(salient: Mask, axis: int) -> slice:
    places = np.flatnonzero(salient.any(axis=axis))
    return slice(int(places[0]), int(places[-1]) + 1)


def _extend(errors: Values, salient: Mask, around: Distances) -> Values:
    """The errors of salient pixels [H, W], and elsewhere that of the nearest one; 0 beyond the radius of the filter.

    `around` holds the padded distances [H + 2 pads, W + 2 pads], the shape of the result; outside the image they are 0.
    Of salient pixels at the same distance, the leftmost is taken, and of these the uppermost. OpenCV's transform with
    labels is approximate, so neighbors are looked up here.
    """
    extended = np.full(around.shape, -1.0)  # -1 marks "not salient"
    np.copyto(extended[_PAD:-_PAD, _PAD:-_PAD], errors, where=salient)
    values = extended.ravel()
    pixels = np.flatnonzero((around > 0) & (around < _PAD + 0.5))
    squares = np.rint(np.square(around.ravel()[pixels])).astype(np.intp)
    pixels, squares = pixels[squares <= _MAX_SQUARED], squares[squares <= _MAX_SQUARED]
    candidates = pixels[:, None] + (_offsets @ (around.shape[1], 1))[squares]  # [pixels, offsets]
    # An offset over an edge ends in the padding of another side, or clipped in a corner: where nothing is salient.
    nearest = (values.take(candidates, mode="clip") >= 0).argmax(axis=1)
    values[pixels] = values[candidates[np.arange(len(pixels)), nearest]]
    np.maximum(extended, 0, out=extended)
    return extended


def _false_positives(errors: Values, ground: Mask, distance: Distances) -> float:
    """The summed errors of other pixels, weighted from 1 beside the object to 2 far away."""
    weighted = np.square(distance, dtype=np.float64)
    # The last bits of these distances depend on memory alignment; their squares are integers.
    np.sqrt(np.rint(weighted, out=weighted), out=weighted)
    weighted *= math.log(0.5) / _HALF_LIFE
    np.exp(weighted, out=weighted)
    np.subtract(2, weighted, out=weighted)
    weighted *= errors
    return float(weighted.sum(where=ground))


def _make_offsets() -> npt.NDArray[np.int64]:
    """All (row, column) offsets of each squared length, leftmost first, then uppermost: [squares, offsets, 2]."""
    span = range(-_PAD, _PAD + 1)
    grouped: list[list[tuple[int, int]]] = [[] for _ in range(2 * _PAD**2 + 1)]
    for column in span:
        for row in span:
            grouped[row**2 + column**2].append((row, column))
    grouped = grouped[: _MAX_SQUARED + 1]
    most = max(map(len, grouped))
    # Shorter lists are padded with the offset to the pixel itself, which is not salient.
    return np.array([offsets + [(0, 0)] * (most - len(offsets)) for offsets in grouped])


def _make_gaussian() -> Values:
    weights = np.exp(-(np.arange(-_RADIUS, _RADIUS + 1) ** 2) / (2 * _SIGMA**2))
    return np.asarray(weights / weights.sum())


_offsets = _make_offsets()
_gaussian = _make_gaussian()
