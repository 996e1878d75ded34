"""However long a run is, its series stay small and keep their extremes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from paceline.report.history import NUM_BUCKETS, Point, Series, downsample

values = st.none() | st.floats(-1e6, 1e6)


@given(st.lists(values, max_size=300), st.integers(1, 40), st.integers(1, 50))
def test_extremes_ends_and_order_are_kept(found: list[float | None], num_buckets: int, every: int) -> None:
    points: list[Point] = [(every * place, value) for place, value in enumerate(found)]
    kept = downsample(points, num_buckets)
    assert set(kept) <= set(points)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert kept[:1] + kept[-1:] == points[:1] + points[-1:]
    known, left = ([value for _, value in each if value is not None] for each in (points, kept))
    assert (min(known, default=0), max(known, default=0)) == (min(left, default=0), max(left, default=0))
    assert (None in found) == (None in [value for _, value in kept])
    assert len(kept) <= max(2 * num_buckets, 3 * num_buckets + 2)


def test_each_bucket_keeps_its_own_extremes() -> None:
    points: list[Point] = [(step, math.sin(step) + step) for step in range(1000)]
    kept = downsample(points, 10)
    for start in range(0, 1000, 100):
        own = [value for step, value in points if start <= step < start + 100 and value is not None]
        assert {min(own), max(own)} <= {value for step, value in kept if start <= step < start + 100}


def test_a_long_series_is_small_and_loses_no_spike() -> None:
    series = Series()
    spikes = {7: 1e3, 55_555: -1e3, 99_998: 2e3}
    for step in range(100_000):
        series.add(step, math.nan if step == 40_000 else spikes.get(step, math.sin(step)))
    points = series.points()
    assert spikes.items() <= dict(points).items()
    assert (40_000, None) in points
    assert len(points) <= 2 * NUM_BUCKETS + 3
    assert len(series._points) <= 8 * NUM_BUCKETS
