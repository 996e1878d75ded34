"""S-measure and weighted F-measure of saliency maps."""

from __future__ import annotations

import math

import cv2
import numpy as np
import numpy.typing as npt

from paceline.metrics.saliency_curves import EPSILON, Mask, Values


def s_measure(prediction: Values, truth: Mask) -> float:
    """Half for the object and the ground, half for the regions; for a mask all alike, the prediction's agreement."""
    share = float(truth.mean())
    if share in (0.0, 1.0):
        mean = float(prediction.mean())
        return mean if share else 1 - mean
    return max(0.0, 0.5 * _object_score(prediction, truth, share) + 0.5 * _region_score(prediction, truth))


def _object_score(prediction: Values, truth: Mask, share: float) -> float:
    inside, outside = prediction[truth], prediction[~truth]
    mean, ground_mean = float(inside.mean()), float(outside.mean())
    object_score = _evenness(mean, _variation(inside, mean))
    ground_score = _evenness(1 - ground_mean, _variation(outside, ground_mean))
    return share * object_score + (1 - share) * ground_score


def _evenness(mean: float, deviation: float) -> float:
    """Near 1 for values that are high and alike."""
    return 2 * mean / (mean**2 + 1 + deviation + EPSILON)


def _variation(values: Values, mean: float) -> float:
    """The standard deviation; 0 for a single value."""
    return math.sqrt(_squares(values, mean) / max(1, values.size - 1))


def _squares(values: Values, mean: float) -> float:
    off = values - mean
    off *= off
    return float(off.sum())


def _region_score(prediction: Values, truth: Mask) -> float:
    """The likeness of the four parts into which the mask's center cuts the image, weighted by their areas."""
    height, width = truth.shape
    row, column = (_centre(truth.sum(axis=axis)) + 1 for axis in (1, 0))
    score = 0.0
    for rows in (slice(0, row), slice(row, height)):
        for columns in (slice(0, column), slice(column, width)):
            part = truth[rows, columns]
            if part.size:
                score += part.size / truth.size * _likeness(prediction[rows, columns], part)
    return score


def _centre(salient: Values) -> int:
    """The mean place, rounded, of what is counted in `salient` for each row or column."""
    return round(int(salient @ np.arange(len(salient))) / int(salient.sum()))


def _likeness(prediction: Values, truth: Mask) -> float:
    """Structural similarity of two regions without its stabilizing constants.

    Rounding decides whether a region of one value has a variance of exactly 0, and thereby whether it is all alike or
    not at all. The variance is therefore computed by the steps that the reference implementation takes.
    """
    size, num_salient = truth.size, int(np.count_nonzero(truth))
    mean, true_mean = float(prediction.mean()), num_salient / size
    variance = _squares(prediction, mean)
    true_variance = true_mean * (size - num_salient)
    is_mixed = 0 < num_salient < size
    covariance = float(prediction.sum(where=truth)) - num_salient * mean if is_mixed else 0.0
    alike = 4 * mean * true_mean * covariance / (size - 1 + EPSILON)
    unlike = (mean**2 + true_mean**2) * (variance + true_variance) / (size - 1 + EPSILON)
    if alike != 0:
        return alike / (unlike + EPSILON)
    return 1.0 if unlike == 0 else 0.0


Distances = npt.NDArray[np.float32]

_REACH = 3  # of the smoothing, in pixels to each side
_SPREAD = 5.0  # its standard deviation
_FARTHEST = 2 * _REACH**2  # the greatest squared distance that it spans
_RIM = math.isqrt(_FARTHEST)  # hence the most rows or columns
_HALVING = 5.0  # the distance over which what is missing to double weight halves


def weighted_f(errors: Values, truth: Mask) -> float:
    """Weighted precision and recall in one, with β² = 1, from absolute errors; 0 if nothing is salient."""
    num_salient = int(np.count_nonzero(truth))
    if num_salient == 0:
        return 0.0
    ground = ~truth
    distance: Distances = cv2.distanceTransform(ground.view(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    missed = _missed(errors, truth, distance)
    wrongly = _wrongly(errors, ground, distance)
    hits = num_salient - missed
    recall = 1 - missed / num_salient
    precision = hits / (hits + wrongly + EPSILON)
    return 2 * recall * precision / (recall + precision + EPSILON)


def _missed(errors: Values, truth: Mask, distance: Distances) -> float:
    """The errors of salient pixels, each no more than the smoothed error there; added up."""
    rows, columns = _extent(truth, axis=1), _extent(truth, axis=0)
    errors, salient = errors[rows, columns], truth[rows, columns]
    around = cv2.copyMakeBorder(distance, _RIM, _RIM, _RIM, _RIM, cv2.BORDER_CONSTANT, value=0)
    around = around[rows.start : rows.stop + 2 * _RIM, columns.start : columns.stop + 2 * _RIM]
    continued = _continued(errors, salient, around)
    smooth = cv2.sepFilter2D(continued, cv2.CV_64F, _smoothing, _smoothing)[_RIM:-_RIM, _RIM:-_RIM]
    return float(np.minimum(errors, smooth)[salient].sum())


def _extent(salient: Mask, axis: int) -> slice:
    places = np.flatnonzero(salient.any(axis=axis))
    return slice(int(places[0]), int(places[-1]) + 1)


def _continued(errors: Values, salient: Mask, around: Distances) -> Values:
    """The errors of salient pixels [H, W], and outside of them that of the nearest; 0 beyond what smoothing spans.

    `around` has the distances with a rim [H + 2 rims, W + 2 rims], as has the result; beyond the image they are 0.
    Of salient pixels equally near, one in the leftmost column is taken, and of these the uppermost.
    """
    continued = np.full(around.shape, -1.0)  # a mark for "not salient"
    np.copyto(continued[_RIM:-_RIM, _RIM:-_RIM], errors, where=salient)
    values = continued.ravel()
    places = np.flatnonzero((around > 0) & (around < _RIM + 0.5))
    squares = np.rint(np.square(around.ravel()[places])).astype(np.intp)
    places, squares = places[squares <= _FARTHEST], squares[squares <= _FARTHEST]
    candidates = places[:, None] + (_steps @ (around.shape[1], 1))[squares]  # [places, steps]
    # A step over an edge ends on the rim of another side, or clipped in a corner: where nothing is salient.
    nearest = (values.take(candidates, mode="clip") >= 0).argmax(axis=1)
    values[places] = values[candidates[np.arange(len(places)), nearest]]
    np.maximum(continued, 0, out=continued)
    return continued


def _wrongly(errors: Values, ground: Mask, distance: Distances) -> float:
    """The errors of other pixels, weighted from 1 beside the object to 2 far away; added up."""
    weighted = np.square(distance, dtype=np.float64)
    # Squares of distances are whole numbers. The last bits of these roots depend on where in memory they were computed.
    np.sqrt(np.rint(weighted, out=weighted), out=weighted)
    weighted *= math.log(0.5) / _HALVING
    np.exp(weighted, out=weighted)
    np.subtract(2, weighted, out=weighted)
    weighted *= errors
    return float(weighted.sum(where=ground))


def _steps_of_squares() -> npt.NDArray[np.int64]:
    """All steps of rows and columns with each squared length, leftmost first, then uppermost: [squares, steps, 2]."""
    span = range(-_RIM, _RIM + 1)
    grouped: list[list[tuple[int, int]]] = [[] for _ in range(2 * _RIM**2 + 1)]
    for column in span:
        for row in span:
            grouped[row**2 + column**2].append((row, column))
    grouped = grouped[: _FARTHEST + 1]
    most = max(map(len, grouped))
    # Shorter lists are filled with a step that leads nowhere, to a pixel that is not salient.
    return np.array([steps + [(0, 0)] * (most - len(steps)) for steps in grouped])


def _bell() -> Values:
    weights = np.exp(-(np.arange(-_REACH, _REACH + 1) ** 2) / (2 * _SPREAD**2))
    return np.asarray(weights / weights.sum())


_steps = _steps_of_squares()
_smoothing = _bell()
