"""Metrics that depend on counts of pixels alone: F and E at one threshold or at all 256, IoU and the balanced error."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
"""A prediction from 0 to 1, or metrics."""
Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

LEVELS = 256
_BETA_SQUARED = 0.3
EPSILON = float(np.finfo(np.float64).eps)
"""What denominators are kept from 0 by."""


class Overlap(NamedTuple):
    """How the pixels called salient lie on those that are, for one threshold [] or for many [T]."""

    hits: Counts
    false_alarms: Counts
    num_salient: int
    num_other: int


def overlaps(prediction: Values, truth: Mask) -> Overlap:
    """The overlap at the thresholds 0, 1/255, … 1, from a joint histogram; values are rounded down to these."""
    cells = (prediction * (LEVELS - 1)).astype(np.uint8) + truth * np.uint16(LEVELS)
    histograms = np.bincount(cells.ravel(), minlength=2 * LEVELS).reshape(2, LEVELS)
    false_alarms, hits = histograms[:, ::-1].cumsum(axis=1)[:, ::-1]
    return Overlap(hits, false_alarms, *_areas(truth))


def overlap_at(called: Mask, truth: Mask) -> Overlap:
    """The overlap of one choice of pixels."""
    hits = np.count_nonzero(called & truth)
    return Overlap(np.asarray(hits), np.asarray(np.count_nonzero(called) - hits), *_areas(truth))


def f_measure(overlap: Overlap) -> Values:
    """Precision and recall in one, with β² = 0.3; 0 where there is no hit."""
    precision = _ratio(overlap.hits, overlap.hits + overlap.false_alarms)
    recall = _ratio(overlap.hits, np.asarray(overlap.num_salient))
    return _ratio((1 + _BETA_SQUARED) * precision * recall, _BETA_SQUARED * precision + recall)


def e_measure(overlap: Overlap) -> Values:
    """How well choice and truth are aligned, both taken relative to their means.

    If all of the truth is alike it is the share of pixels that agree. The sum is divided by one pixel less than there
    are, as it was published; for an image of a single pixel by 1.
    """
    hits, false_alarms, num_salient, num_other = overlap
    size = num_salient + num_other
    called = hits + false_alarms
    if num_salient == 0:
        total = np.asarray(size - called, np.float64)
    elif num_other == 0:
        total = np.asarray(called, np.float64)
    else:
        mean, true_mean = called / size, num_salient / size
        total = (
            hits * _alignment(1 - mean, 1 - true_mean)
            + false_alarms * _alignment(1 - mean, -true_mean)
            + (num_salient - hits) * _alignment(-mean, 1 - true_mean)
            + (num_other - false_alarms) * _alignment(-mean, -true_mean)
        )
    return total / max(1, size - 1)


def intersection_over_union(overlap: Overlap) -> Values:
    """The share of what is called or is salient that is both; 0 if there is neither."""
    return _ratio(overlap.hits, overlap.num_salient + overlap.false_alarms)


def balanced_error(overlap: Overlap) -> Values:
    """1 less the mean of the shares that are right among the salient and among the other pixels.

    Where there are none of a kind, their share is 0.
    """
    right = overlap.num_other - overlap.false_alarms
    found, kept = _ratio(overlap.hits, np.asarray(overlap.num_salient)), _ratio(right, np.asarray(overlap.num_other))
    return 1 - 0.5 * (found + kept)


def _alignment(deviation: Values, true_deviation: float) -> Values:
    aligned = 2 * deviation * true_deviation / (deviation**2 + true_deviation**2 + EPSILON)
    return np.asarray((aligned + 1) ** 2 / 4)


def _ratio(part: npt.NDArray[np.generic], whole: npt.NDArray[np.generic]) -> Values:
    """Where the whole is 0 the part is 0 too, and so is the ratio."""
    return np.asarray(part / np.where(whole == 0, 1, whole))


def _areas(truth: Mask) -> tuple[int, int]:
    num_salient = int(np.count_nonzero(truth))
    return num_salient, truth.size - num_salient
