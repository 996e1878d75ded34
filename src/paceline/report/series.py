"""Series of values over steps, bounded in size however long a run is; extremes are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator

Point = tuple[int, float | None]
"""A step and the value there; None where it was not finite."""

NUM_BUCKETS = 500
"""Intervals of steps that a series is reduced to; each keeps its least and its greatest value."""
_MAX_POINTS = 8 * NUM_BUCKETS


class Series:
    """The values of a metric by step, in the order in which they were logged.

    Points beyond a limit are reduced at once, so that the memory of a series does not grow with the run.
    """

    def __init__(self) -> None:
        self._points: list[Point] = []

    def add(self, step: int, value: float | None) -> None:
        """Add the next point."""
        self._points.append((step, value if value is not None and math.isfinite(value) else None))
        if len(self._points) > _MAX_POINTS:
            self._points = downsample(self._points, 2 * NUM_BUCKETS)

    def points(self) -> list[Point]:
        """At most four points for each of `NUM_BUCKETS` intervals, usually two."""
        return downsample(self._points, NUM_BUCKETS)


def downsample(points: list[Point], num_buckets: int) -> list[Point]:
    """The first and last point, and of each interval of steps the least, the greatest and the first missing value.

    Fewer than two points per interval are returned as they are.
    """
    if len(points) <= 2 * num_buckets:
        return points
    first, last = points[0][0], points[-1][0]
    width = max(1, math.ceil((last - first + 1) / num_buckets))
    kept: list[Point] = [points[0]]
    for bucket in _buckets(points, first, width):
        known = [point for point in bucket if point[1] is not None]
        chosen = {min(known, key=_value), max(known, key=_value)} if known else set()
        chosen |= set([point for point in bucket if point[1] is None][:1])
        kept += sorted(chosen - {points[0], points[-1]}, key=lambda point: point[0])
    return [*kept, points[-1]]


def _buckets(points: list[Point], first: int, width: int) -> Iterator[list[Point]]:
    bucket: list[Point] = []
    end = first + width
    for point in points:
        while point[0] >= end:
            if bucket:
                yield bucket
                bucket = []
            end += width
        bucket.append(point)
    yield bucket


def _value(point: Point) -> float:
    return point[1] or 0.0
