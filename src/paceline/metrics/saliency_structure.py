"""The S-measure: how alike the structure of a prediction and that of a mask are, as objects and in four regions."""

from __future__ import annotations

import math

import numpy as np

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
    """The likeness of the four parts into which the mask's centre cuts the image, weighted by their areas."""
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
    """Structural similarity of two regions without its stabilising constants.

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
