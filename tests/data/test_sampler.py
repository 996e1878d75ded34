"""The order contract and the batch contract: which sample comes when, and how updates are cut."""

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.sampler import BatchSampler, BatchSlice, Permutation, evaluation_slices, rank_slices

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "order.json").read_text(encoding="utf-8"))
LARGE = 10**9
SIZES = st.integers(1, 5000)
SEEDS = st.integers(0, 2**63 - 1)
BLOCK = 8192


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['size']}-{case['seed']}-{case['epoch']}")
def test_order_is_the_one_it_always_was(case: dict[str, Any]) -> None:
    order = Permutation(case["size"], case["seed"])
    stop = case["start"] + len(case["samples"])
    assert order.at(case["epoch"], case["start"], stop).tolist() == case["samples"]
    assert order.permute(case["epoch"], np.arange(case["start"], stop)).tolist() == case["samples"]


@settings(deadline=None)
@given(SIZES, SEEDS, st.integers(0, 10**6))
def test_every_sample_has_one_position(size: int, seed: int, epoch: int) -> None:
    samples = Permutation(size, seed).at(epoch, 0, size)
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(size))


def test_samples_of_a_huge_set_are_unique_and_inside() -> None:
    order, generator = Permutation(LARGE, 1), np.random.default_rng(0)
    positions = generator.choice(LARGE, 100_000, replace=False)
    samples = order.permute(4, positions)
    assert len(np.unique(samples)) == len(positions)
    assert samples.min() >= 0
    assert samples.max() < LARGE
    # Uniform: the mean of 100,000 lies within five standard deviations of the middle.
    assert abs(samples.mean() / LARGE - 0.5) < 5 / np.sqrt(12 * len(positions))


def test_the_last_positions_of_a_huge_set_exist() -> None:
    order = Permutation(LARGE, 1)
    samples = order.at(2, LARGE - 50, LARGE)
    assert len(samples) == len(np.unique(samples)) == 50
    assert samples.max() < LARGE


@settings(deadline=None)
@given(SEEDS, st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 20_000]), st.data())
def test_slices_agree_with_single_positions_across_blocks(seed: int, size: int, data: st.DataObject) -> None:
    order = Permutation(size, seed)
    near = st.sampled_from([0, BLOCK, 2 * BLOCK, size])
    for _ in range(4):
        middle, reach = data.draw(near), data.draw(st.integers(0, 40))
        start, stop = max(0, min(size, middle - reach)), min(size, middle + data.draw(st.integers(0, 40)))
        stop = max(start, stop)
        epoch = data.draw(st.integers(0, 2))
        assert np.array_equal(order.at(epoch, start, stop), order.permute(epoch, np.arange(start, stop)))


def test_what_was_asked_before_does_not_matter() -> None:
    fresh, used = Permutation(20_000, 9), Permutation(20_000, 9)
    for epoch, start in ((3, 0), (0, 12_000), (3, 8000), (1, 8000)):
        used.at(epoch, start, start + 500)
    for epoch, start in ((1, 8000), (0, 0), (3, 19_500)):
        assert np.array_equal(used.at(epoch, start, start + 500), fresh.at(epoch, start, start + 500))


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(Permutation(100, seed).at(epoch, 0, 100).tolist()) for seed in range(5) for epoch in range(200)]
    assert len(set(orders)) == len(orders)


def test_memory_does_not_grow_with_the_set() -> None:
    order = Permutation(LARGE, 0)
    order.at(0, 0, 256)  # numpy's own first-time allocations
    tracemalloc.start()
    try:
        for epoch in range(3):
            for start in (0, 10**6 - 100, LARGE - 300):
                order.at(epoch, start, start + 256)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_over_epochs_a_sample_is_everywhere_alike() -> None:
    size, epochs = 20, 2000
    order = Permutation(size, 0)
    counts = np.zeros(size)
    for epoch in range(epochs):
        counts[np.flatnonzero(order.permute(epoch, np.arange(size)) == 0)] += 1
    expected = epochs / size
    # The 99.9 % point of chi-square with 19 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 43.82


def test_neighbors_are_drawn_independently() -> None:
    size, epochs = 8, 2240
    order = Permutation(size, 1)
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[tuple(order.permute(epoch, np.arange(2)))] += 1
    expected = epochs / (size * (size - 1))
    others = ~np.eye(size, dtype=bool)
    assert counts[~others].sum() == 0
    # The 99.9 % point of chi-square with 55 degrees of freedom.
    assert ((counts[others] - expected) ** 2 / expected).sum() < 93.17


def test_within_an_epoch_nothing_is_correlated() -> None:
    size = 10_000
    order = Permutation(size, 2)
    first, second = order.permute(0, np.arange(size)), order.permute(1, np.arange(size))
    for one, other in ((first[:-1], first[1:]), (first, np.arange(size)), (first, second)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(size)


CUTTINGS = st.tuples(st.integers(1, 400), st.integers(1, 130), st.integers(1, 40), st.integers(1, 9))


@settings(deadline=None)
@given(CUTTINGS)
def test_every_sample_comes_once_an_epoch(cutting: tuple[int, int, int, int]) -> None:
    size, batch, micro_batch_size, world = cutting
    updates = BatchSampler(size, batch, micro_batch_size)
    for epoch in (0, 3):
        seen: list[int] = []
        for step in range(epoch * updates.steps_per_epoch, (epoch + 1) * updates.steps_per_epoch):
            assert updates.epoch(step) == epoch
            for rank in range(world):
                for cut in rank_slices(updates.slices(step), rank, world):
                    seen.extend(range(cut.start, cut.stop))
        assert seen == list(range(size))


@settings(deadline=None)
@given(CUTTINGS)
def test_micro_batches_are_even_within_the_limit_and_never_empty(cutting: tuple[int, int, int, int]) -> None:
    size, batch, micro_batch_size, _ = cutting
    updates = BatchSampler(size, batch, micro_batch_size)
    for step in range(updates.steps_per_epoch):
        slices = updates.slices(step)
        sizes = [cut.stop - cut.start for cut in slices]
        assert [cut.index for cut in slices] == list(range(len(slices)))
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
        assert max(sizes) <= micro_batch_size
        assert sum(sizes) == min(batch, size - step * batch)
        # No more of them than needed.
        assert len(slices) == -(-sum(sizes) // micro_batch_size)


@settings(deadline=None)
@given(CUTTINGS)
def test_ranks_own_contiguous_shares_that_differ_by_one(cutting: tuple[int, int, int, int]) -> None:
    size, batch, micro_batch_size, world = cutting
    slices = BatchSampler(size, batch, micro_batch_size).slices(0)
    shares = [rank_slices(slices, rank, world) for rank in range(world)]
    assert [cut for share in shares for cut in share] == slices
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


def test_more_ranks_than_micro_batches_leaves_some_with_nothing() -> None:
    updates = BatchSampler(size=10, batch=10, micro_batch_size=5)
    shares = [rank_slices(updates.slices(0), rank, 7) for rank in range(7)]
    assert sorted(len(share) for share in shares) == [0, 0, 0, 0, 0, 1, 1]
    assert [cut for share in shares for cut in share] == [BatchSlice(0, 0, 5), BatchSlice(1, 5, 10)]


def test_the_cut_of_an_update_does_not_depend_on_processes_or_on_what_came_before() -> None:
    updates = BatchSampler(size=150, batch=64, micro_batch_size=13)
    assert [cut.stop - cut.start for cut in updates.slices(0)] == [12, 13, 13, 13, 13]
    assert updates.slices(4) == updates.slices(1)
    assert updates.slices(2) == [BatchSlice(0, 128, 139), BatchSlice(1, 139, 150)]


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 130), st.integers(1, 40))
def test_drop_last_leaves_out_only_the_smaller_update(size: int, batch: int, micro_batch_size: int) -> None:
    size = max(size, batch)
    kept, whole = (
        BatchSampler(size, batch, micro_batch_size, drop_last=True),
        BatchSampler(size, batch, micro_batch_size),
    )
    assert kept.steps_per_epoch == size // batch
    assert [kept.slices(step) for step in range(kept.steps_per_epoch)] == [
        whole.slices(step) for step in range(kept.steps_per_epoch)
    ]
    second = kept.slices(kept.steps_per_epoch)
    assert (second[0].start, second[-1].stop) == (0, batch)
    assert kept.epoch(kept.steps_per_epoch) == 1


@given(st.integers(0, 500), st.integers(1, 200))
def test_evaluation_batches_are_multiples_of_the_batch(size: int, batch: int) -> None:
    slices = evaluation_slices(size, batch)
    assert [cut.start for cut in slices] == [batch * cut.index for cut in slices]
    assert all(one.stop == other.start for one, other in pairwise(slices))
    assert all(cut.stop - cut.start == batch for cut in slices[:-1])
    assert sum(cut.stop - cut.start for cut in slices) == size
