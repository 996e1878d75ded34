import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.data.rng import derive, uniforms

WORD = 2**64
ANY_INT = st.integers(-(2**80), 2**80)
IDS = st.lists(st.integers(0, 2**62), min_size=1, max_size=5)


def folded(*parts: int) -> int:
    """The hash by its definition, in whole numbers of any size."""
    state = 0
    for part in parts:
        state = (state + (part % WORD + 1) * 0x9E3779B97F4A7C15) % WORD
        state ^= state // 2**30
        state = state * 0xBF58476D1CE4E5B9 % WORD
        state ^= state // 2**27
        state = state * 0x94D049BB133111EB % WORD
        state ^= state // 2**31
    return state


def test_finaliser_is_that_of_splitmix64() -> None:
    # The first outputs of the published splitmix64 generator with state 0, and with state 1234567.
    assert folded(0) == 0xE220A8397B1DCDAF
    first_of_1234567 = 6457827717110365317
    inverse = pow(0x9E3779B97F4A7C15, -1, WORD)
    assert folded(1234567 * inverse % WORD) == first_of_1234567


@given(ANY_INT, st.lists(ANY_INT, max_size=3))
def test_derive_follows_its_definition(seed: int, parts: list[int]) -> None:
    assert derive(seed, *parts) == folded(seed, *parts) // 2
    assert 0 <= derive(seed, *parts) < 2**63


@given(ANY_INT, st.integers(0, 2**40), IDS, st.integers(0, 50), st.integers(0, 4))
def test_uniforms_follow_their_definition(seed: int, epoch: int, ids: list[int], stream: int, draws: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = uniforms(seed, epoch, np.array(ids), stream, draws)
    expected = [[folded(seed, epoch, stream, sample, draw) // 2**11 / 2**53 for draw in range(draws)] for sample in ids]
    assert found.dtype == np.float64
    assert found.shape == (len(ids), draws)
    assert found.tolist() == expected


def test_golden_values() -> None:
    assert uniforms(0, 0, np.array([0, 7]), 0, 2).round(9).tolist() == [
        [0.47141043, 0.724752079],
        [0.393006638, 0.253718675],
    ]
    assert derive(0, 1, 2) == 4200486071987119452


def test_neighboring_seeds_epochs_and_streams_all_differ() -> None:
    keys = [(seed, epoch, stream) for seed in (-1, 0, 1, 2**63, 2**64 - 2) for epoch in range(3) for stream in range(3)]
    rows = {tuple(uniforms(seed, epoch, np.arange(4), stream, 2).ravel()) for seed, epoch, stream in keys}
    assert len(rows) == len(keys)


@pytest.mark.parametrize("bins", [10, 256])
def test_uniforms_fill_the_interval_evenly(bins: int) -> None:
    for seed in range(3):
        numbers = uniforms(seed, 0, np.arange(50_000), 0, 1)[:, 0]
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert _is_plausible(np.histogram(numbers, bins, (0, 1))[0])


def test_pairs_of_draws_fill_the_square_evenly() -> None:
    pairs = uniforms(5, 2, np.arange(50_000), 1, 2)
    assert _is_plausible(np.histogram2d(pairs[:, 0], pairs[:, 1], 12, [(0, 1), (0, 1)])[0].ravel())


def test_neighbors_are_not_correlated() -> None:
    ids = np.arange(20_000)
    here = uniforms(3, 4, ids, 1, 2)
    others = {
        "id": uniforms(3, 4, ids + 1, 1, 2),
        "epoch": uniforms(3, 5, ids, 1, 2),
        "stream": uniforms(3, 4, ids, 2, 2),
        "seed": uniforms(4, 4, ids, 1, 2),
        "draw": here[:, ::-1],
    }
    for what, other in others.items():
        # The correlation of 20,000 independent pairs has a standard deviation of 0.007.
        assert abs(np.corrcoef(here[:, 0], other[:, 0])[0, 1]) < 0.03, what


def _is_plausible(counts: NDArray[np.float64] | NDArray[np.int64]) -> bool:
    """Whether chi-square lies within five standard deviations of what even filling gives."""
    expected = float(counts.sum()) / len(counts)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    return abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)
